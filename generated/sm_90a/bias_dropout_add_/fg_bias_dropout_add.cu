// bias_dropout_add: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((x_dim0 * 8192 + 1023) // 1024), block 128.
// Reads x_dim0 * 32768 + 16384 bytes, writes x_dim0 * 16384.
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

// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
  return static_cast<i32>(blockIdx.x);
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
  static_assert(width == 16, "no other accesses were expected");
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
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }

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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One element from global memory. Never the read-only path: outputs may alias inputs.
__device__ __forceinline__ i16 load(const i16* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<i16>(bits);
}
__device__ __forceinline__ i64 load(const i64* base, i64 i) {
  u64 bits;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
__device__ __forceinline__ bf16 load(const bf16* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}

// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
__device__ __forceinline__ i16 load_once(const i16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<i16>(bits);
}
__device__ __forceinline__ i64 load_once(const i64* base, i64 i) {
  u64 bits;
  asm("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
__device__ __forceinline__ bf16 load_once(const bf16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ i64 widen(i16 x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }

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

// Two neighbouring elements of a buffer that the kernel does not write, aligned to the size of both, in their computing type.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide(Wide (&dst)[2], const T* base, i64 i) {
  T pair[2];
  const T* from = base + i;
  static_assert(sizeof(T) == 2 || sizeof(T) == 8, "no other elements were expected");
  if constexpr (sizeof(T) == 8) {
    u64 bits[2];
    asm("ld.global.v2.b64 {%0, %1}, [%2];" : "=l"(bits[0]), "=l"(bits[1]) : "l"(from));
    memcpy(pair, bits, sizeof(pair));
  }
  if constexpr (sizeof(T) == 2) {
    u32 bits;
    asm("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    memcpy(pair, &bits, sizeof(pair));
  }
  widen_vec(pair, dst);
}

// Random bits, 16 an element, which load() and its kind give as if they lay in memory: Philox-4x32-10 of Salmon et al. (2011).
struct RandomBits { u32 low, high, stream; };

__device__ __forceinline__ RandomBits random_bits(const i64* key, u32 stream) {
  const u64 bits = static_cast<u64>(load_once(key, 0));
  return {static_cast<u32>(bits), static_cast<u32>(bits >> 32), stream};
}

// The bits of the eight elements from 8 * call on.
__device__ __forceinline__ void philox(u32* words, RandomBits key, u64 call) {
  u32 c0 = static_cast<u32>(call), c1 = static_cast<u32>(call >> 32), c2 = key.stream, c3 = 0;
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    const u32 left = c0, right = c2;
    c0 = __umulhi(right, 0xCD9E8D57u) ^ c1 ^ (key.low + round * 0x9E3779B9u);
    c2 = __umulhi(left, 0xD2511F53u) ^ c3 ^ (key.high + round * 0xBB67AE85u);
    c1 = right * 0xCD9E8D57u;
    c3 = left * 0xD2511F53u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Up to eight neighbours, of which every W-th is at a multiple of W.
template <int W, int N>
__device__ __forceinline__ void load_lanes(i16 (&dst)[N], RandomBits key, i64 i) {
  static_assert(N <= 8 && 8 % W == 0, "");
  const i32 place = static_cast<i32>(i) & 7;
  u32 words[8] = {};
  philox(words, key, static_cast<u64>(i) >> 3);
  if constexpr (W < N) {
    if (place + N > 8) philox(words + 4, key, (static_cast<u64>(i) >> 3) + 1);
  }
  if constexpr (W < 8) {  // the first one's bits move to the front
#pragma unroll
    for (i32 w = 0; w + 2 < 8; ++w) words[w] = place & 4 ? words[w + 2] : words[w];
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 2 ? words[w + 1] : words[w];
  }
  if constexpr (W < 2) {
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 1 ? words[w] >> 16 | words[w + 1] << 16 : words[w];
  }
  memcpy(dst, words, sizeof(dst));
}

__device__ __forceinline__ i16 load(RandomBits key, i64 i) {
  i16 one[1];
  load_lanes<1>(one, key, i);
  return one[0];
}

__device__ __forceinline__ i16 load_once(RandomBits key, i64 i) { return load(key, i); }

// Two neighbours, of which the first is at a multiple of two.
__device__ __forceinline__ void load_wide(i64 (&dst)[2], RandomBits key, i64 i) {
  i16 pair[2];
  load_lanes<2>(pair, key, i);
  dst[0] = pair[0];
  dst[1] = pair[1];
}

// N consecutive elements to global memory, in accesses of vector_width(N * sizeof(T)) bytes, to which they are aligned.
template <int N, typename T>
__device__ __forceinline__ void store_vec(T* base, i64 i, const T (&src)[N]) {
  constexpr i32 bytes = N * sizeof(T);
  constexpr i32 width = vector_width(bytes);
  static_assert(width == 16, "no other accesses were expected");
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bias_dropout_add(float x, float bias, i64 random, float residual, i64 scalar_1, float scalar_2) {
    const bool ge_1 = static_cast<i32>(random) >= static_cast<i32>(static_cast<i64>(static_cast<i16>(scalar_1)));  // line 9: return x.copy_(fg.dropout(x if bias is None else x + bias, p, training,…
    return (x + bias) * (ge_1 ? scalar_2 : 0.0f) + residual;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_bias_dropout_add(const bf16* bias_ptr, const i64* random_ptr, const bf16* residual_ptr, bf16* x_ptr, i64 x_dim0, i64 scalar_1, double scalar_2) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = x_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 x_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
    i16 random_raw[UNROLL][LANES];
    bf16 residual_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 8192;
        const Index i1 = position - i0 * 8192;
        load_lanes<8>(x_raw[u], x_ptr, i0 * 8192 + i1);
        load_lanes<8>(bias_raw[u], bias_ptr, i1);
        load_lanes<8>(random_raw[u], random_bits(random_ptr, 0), i0 * 8192 + i1);
        load_lanes<8>(residual_raw[u], residual_ptr, i0 * 8192 + i1);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 8192;
        const Index i1 = position - i0 * 8192;
        float x[8];
        widen_vec(x_raw[u], x);
        float bias[8];
        widen_vec(bias_raw[u], bias);
        i64 random[8];
        widen_vec(random_raw[u], random);
        float residual[8];
        widen_vec(residual_raw[u], residual);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_dropout_add(x[v], bias[v], random[v], residual[v], scalar_1, scalar_2);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(x_ptr, i0 * 8192 + i1, result_raw);
    }
}
