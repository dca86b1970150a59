// bias_split_heads__0: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((qkv_dim0 * qkv_dim1 * 4096 + 1023) // 1024), block 128.
// Reads qkv_dim0 * qkv_dim1 * 12288 + 12288 bytes, writes qkv_dim0 * qkv_dim1 * 8192.
// bias_split_heads__1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((qkv_dim0 * qkv_dim1 * 1024 + 1023) // 1024), block 128.
// Reads qkv_dim0 * qkv_dim1 * 12288 + 12288 bytes, writes qkv_dim0 * qkv_dim1 * 2048.
// bias_split_heads__2: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((qkv_dim0 * qkv_dim1 * 1024 + 1023) // 1024), block 128.
// Reads qkv_dim0 * qkv_dim1 * 12288 + 12288 bytes, writes qkv_dim0 * qkv_dim1 * 2048.
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

// Number of blocks in the grid.
__device__ __forceinline__ i32 block_count() {
  return static_cast<i32>(gridDim.x);
}

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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

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

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bias_split_heads__0(float qkv, float bias) {
    return qkv + bias;                                                                // line 32: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* out_0_ptr, i64 qkv_dim0, i64 qkv_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = qkv_dim0 * qkv_dim1 * 4096;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 qkv_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 32;
        const Index i2_part = i2_within_outer - i2_part_outer * 32;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        load_lanes<8>(qkv_raw[u], qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within);
        load_lanes<8>(bias_raw[u], bias_ptr, i2_part * 128 + i2_within);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 32;
        const Index i2_part = i2_within_outer - i2_part_outer * 32;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        float qkv[8];
        widen_vec(qkv_raw[u], qkv);
        float bias[8];
        widen_vec(bias_raw[u], bias);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_split_heads__0(qkv[v], bias[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_0_ptr, i1 * 128 + i2_part * qkv_dim1 * 128 + i0 * qkv_dim1 * 4096 + i2_within, result_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bias_split_heads__1(float qkv, float bias) {
    return qkv + bias;                                                                // line 32: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* out_1_ptr, i64 qkv_dim0, i64 qkv_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = qkv_dim0 * qkv_dim1 * 1024;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 qkv_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 8;
        const Index i2_part = i2_within_outer - i2_part_outer * 8;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        load_lanes<8>(qkv_raw[u], qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within + 4096);
        load_lanes<8>(bias_raw[u], bias_ptr, i2_part * 128 + i2_within + 4096);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 8;
        const Index i2_part = i2_within_outer - i2_part_outer * 8;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        float qkv[8];
        widen_vec(qkv_raw[u], qkv);
        float bias[8];
        widen_vec(bias_raw[u], bias);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_split_heads__1(qkv[v], bias[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_1_ptr, i0 * qkv_dim1 * 1024 + i1 * 128 + i2_part * qkv_dim1 * 128 + i2_within, result_raw);
    }
}
}  // part_2

namespace part_3 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bias_split_heads__2(float qkv, float bias) {
    return qkv + bias;                                                                // line 32: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* out_2_ptr, i64 qkv_dim0, i64 qkv_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = qkv_dim0 * qkv_dim1 * 1024;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 qkv_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 8;
        const Index i2_part = i2_within_outer - i2_part_outer * 8;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        load_lanes<8>(qkv_raw[u], qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within + 5120);
        load_lanes<8>(bias_raw[u], bias_ptr, i2_part * 128 + i2_within + 5120);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_within_outer = position / 128;
        const Index i2_within = position - i2_within_outer * 128;
        const Index i2_part_outer = i2_within_outer / 8;
        const Index i2_part = i2_within_outer - i2_part_outer * 8;
        const Index i0 = i2_part_outer / static_cast<Index>(qkv_dim1);
        const Index i1 = i2_part_outer - i0 * static_cast<Index>(qkv_dim1);
        float qkv[8];
        widen_vec(qkv_raw[u], qkv);
        float bias[8];
        widen_vec(bias_raw[u], bias);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_split_heads__2(qkv[v], bias[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_2_ptr, i0 * qkv_dim1 * 1024 + i1 * 128 + i2_part * qkv_dim1 * 128 + i2_within, result_raw);
    }
}
}  // part_3

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_bias_split_heads_0_to_2(i64 blocks_1, i64 blocks_2, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* out_0_ptr, bf16* out_1_ptr, bf16* out_2_ptr, i64 qkv_dim0, i64 qkv_dim1) {
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), qkv_ptr, bias_ptr, out_0_ptr, qkv_dim0, qkv_dim1);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    if (block < blocks_2) return part_2::run(block, static_cast<i32>(blocks_2), qkv_ptr, bias_ptr, out_1_ptr, qkv_dim0, qkv_dim1);
    block -= static_cast<i32>(blocks_2);
    blocks -= static_cast<i32>(blocks_2);
    part_3::run(block, blocks, qkv_ptr, bias_ptr, out_2_ptr, qkv_dim0, qkv_dim1);
}
