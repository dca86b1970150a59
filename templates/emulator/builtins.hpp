// Built-ins of CUDA: qualifiers, and device functions that the C library lacks.
#include <math.h>
#include <string.h>

#define __device__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  u32 chosen = 0;
  for (u32 k = 0; k < 4; ++k) chosen |= static_cast<u32>(bytes >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
  return chosen;
}
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, sizeof(x)); return x; }
inline float __int_as_float(i32 bits) { float x; memcpy(&x, &bits, sizeof(x)); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, sizeof(x)); return bits; }
inline i32 __float_as_int(float x) { i32 bits; memcpy(&bits, &x, sizeof(x)); return bits; }
inline double __longlong_as_double(i64 bits) { double x; memcpy(&x, &bits, sizeof(x)); return x; }
inline i64 __double_as_longlong(double x) { i64 bits; memcpy(&bits, &x, sizeof(x)); return bits; }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
inline u64 __umul64hi(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (by & 31)); }
inline i32 __popc(u32 x) { return __builtin_popcount(x); }
inline i32 __clz(i32 x) { return x == 0 ? 32 : __builtin_clz(static_cast<u32>(x)); }
inline i32 __ffs(i32 x) { return __builtin_ffs(x); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }

template <typename T>
inline T min(T a, T b) { return b < a ? b : a; }
template <typename T>
inline T max(T a, T b) { return a < b ? b : a; }
