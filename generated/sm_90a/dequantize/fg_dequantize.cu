// dequantize: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((input_dim0 * 4096 + 1023) // 1024), block 128.
// Reads input_dim0 * 4100 bytes, writes input_dim0 * 8192.
// ---------------------------------------------------------------------------------------------------------------------
// Primitives
// ---------------------------------------------------------------------------------------------------------------------
// Fixed-width scalars, so that the file needs no header. bf16 and f16 are storage only: math widens them first.
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };

// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
  return static_cast<i32>(blockIdx.x);
}

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One element from global memory. Never the read-only path: outputs may alias inputs.
__device__ __forceinline__ f8e4m3 load(const f8e4m3* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<f8e4m3>(static_cast<u8>(bits));
}
__device__ __forceinline__ bf16 load(const bf16* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}
__device__ __forceinline__ float load(const float* base, i64 i) {
  u32 bits;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
  return bit_cast<float>(bits);
}

// Bytes of one memory access to a run of `bytes` bytes: the largest power of two that divides it, at most 16.
// It is also the alignment that load_vec and store_vec ask for.
__device__ __forceinline__ constexpr i32 vector_width(i32 bytes) {
  return bytes % 16 == 0 ? 16 : bytes & -bytes;
}

// N consecutive elements from global memory, in accesses of vector_width(N * sizeof(T)) bytes, to which they are aligned.
template <int N, typename T>
__device__ __forceinline__ void load_vec(T (&dst)[N], const T* base, i64 i) {
  constexpr i32 bytes = N * sizeof(T);
  constexpr i32 width = vector_width(bytes);
  static_assert(width == 8 || width == 16, "no other accesses were expected");
  if constexpr (width == 8) {
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 2)
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[w]), "=r"(words[w + 1]) : "l"(from + w));
    memcpy(dst, words, bytes);
  }
  if constexpr (width == 16) {
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4)
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3]) : "l"(from + w));
    memcpy(dst, words, bytes);
  }
}

// N consecutive elements of which only every W-th is known to start an aligned access.
template <int W, int N, typename T>
__device__ __forceinline__ void load_lanes(T (&dst)[N], const T* base, i64 i) {
  if constexpr (W == N) {
    load_vec(dst, base, i);
  } else {
#pragma unroll
    for (i32 k = 0; k < N; k += W) {
      T part[W];
      load_vec(part, base, i + k);
#pragma unroll
      for (i32 j = 0; j < W; ++j) dst[k + j] = part[j];
    }
  }
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, f8e4m3& out) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  out.bits = static_cast<u8>(pair);
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

// narrow() for arrays; 16-bit floats are converted in pairs, one instruction for two elements.
template <int N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
template <int N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], bf16 (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[k + 1]), "f"(src[k]));
    memcpy(&dst[k], &pair, sizeof(pair));
  }
  if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}
template <int N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], f8e4m3 (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(src[k + 1]), "f"(src[k]));
    memcpy(&dst[k], &pair, sizeof(pair));
  }
  if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}

// N consecutive elements to global memory, in accesses of vector_width(N * sizeof(T)) bytes, to which they are aligned.
template <int N, typename T>
__device__ __forceinline__ void store_vec(T* base, i64 i, const T (&src)[N]) {
  constexpr i32 bytes = N * sizeof(T);
  constexpr i32 width = vector_width(bytes);
  static_assert(width == 8 || width == 16, "no other accesses were expected");
  if constexpr (width == 8) {
    u32* to = reinterpret_cast<u32*>(base + i);
    u32 words[bytes / 4];
    memcpy(words, src, bytes);
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 2)
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(to + w), "r"(words[w]), "r"(words[w + 1]) : "memory");
  }
  if constexpr (width == 16) {
    u32* to = reinterpret_cast<u32*>(base + i);
    u32 words[bytes / 4];
    memcpy(words, src, bytes);
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :: "l"(to + w), "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3]) : "memory");
  }
}

// N consecutive elements of which only every W-th is known to start an aligned access.
template <int W, int N, typename T>
__device__ __forceinline__ void store_lanes(T* base, i64 i, const T (&src)[N]) {
  if constexpr (W == N) {
    store_vec(base, i, src);
  } else {
#pragma unroll
    for (i32 k = 0; k < N; k += W) {
      T part[W];
#pragma unroll
      for (i32 j = 0; j < W; ++j) part[j] = src[k + j];
      store_vec(base, i + k, part);
    }
  }
}

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
}

// The floats of two f8e4m3 in one register, `low` of the lower half, where instructions convert them.
__device__ __forceinline__ void widen_e4m3x2(u16 pair, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<u16>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<u16>(halves >> 16)));
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ float widen(f8e4m3 x) {
  float result, unused;
  widen_e4m3x2(x.bits, result, unused);
  return result;
}
__device__ __forceinline__ float widen(float x) { return x; }

// widen() for arrays; bf16 comes in pairs, one instruction for each element.
template <int N, typename From, typename To>
__device__ __forceinline__ void widen_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k < N; ++k) dst[k] = widen(src[k]);
}
template <int N>
__device__ __forceinline__ void widen_vec(const bf16 (&src)[N], float (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u32 pair;
    memcpy(&pair, &src[k], sizeof(pair));
    dst[k] = bit_cast<float>(pair << 16);
    dst[k + 1] = bit_cast<float>(pair & 0xffff0000u);
  }
  if constexpr (N % 2 != 0) dst[N - 1] = widen(src[N - 1]);
}
template <int N>
__device__ __forceinline__ void widen_vec(const f8e4m3 (&src)[N], float (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u16 pair;
    memcpy(&pair, &src[k], sizeof(pair));
    widen_e4m3x2(pair, dst[k], dst[k + 1]);
  }
  if constexpr (N % 2 != 0) dst[N - 1] = widen(src[N - 1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float dequantize(float input, float scale) {
    return input * scale;                                                             // line 23: return (wide * aligned(scale, input, granularity, group_size)).to(dtype…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_dequantize(const f8e4m3* input_ptr, const float* scale_ptr, bf16* out_ptr, i64 input_dim0) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = input_dim0 * 4096;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    f8e4m3 input_raw[UNROLL][LANES];
    float scale_raw[UNROLL];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 4096;
        const Index i1 = position - i0 * 4096;
        load_lanes<8>(input_raw[u], input_ptr, i0 * 4096 + i1);
        scale_raw[u] = load(scale_ptr, i0);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 4096;
        const Index i1 = position - i0 * 4096;
        float input[8];
        widen_vec(input_raw[u], input);
        const float scale = widen(scale_raw[u]);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = dequantize(input[v], scale);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, i0 * 4096 + i1, result_raw);
    }
}
