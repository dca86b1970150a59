// rotary_position_ids_0: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * 524288 + 1023) // 1024), block 128.
// Reads q_dim0 * q_dim1 * 1048576 + q_dim0 * 32768 bytes, writes q_dim0 * q_dim1 * 1048576.
// rotary_position_ids_1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((k_dim1 * q_dim0 * 524288 + 1023) // 1024), block 128.
// Reads k_dim1 * q_dim0 * 1048576 + q_dim0 * 32768 bytes, writes k_dim1 * q_dim0 * 1048576.
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

// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
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

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ i64 widen(i64 x) { return x; }

// Rounds to the nearest bf16 and back.
__device__ __forceinline__ float round_bf16(float x) {
  bf16 rounded;
  narrow(x, rounded);
  return widen(rounded);
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

// a b of 64 bits: what leaves them is lost, as torch has it, where C++ leaves an overflow undefined.
__device__ __forceinline__ i64 wrap_mul(i64 a, i64 b) {
  return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b));
}

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_position_ids_0(float q, i64 position_ids, i64 position_ids_2, float q_2, float q_3, i64 coordinate, i64 coordinate_2, bool coordinate_3) {
    const float pow_1 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate, 2LL)), 128.0f));  // line 37: frequencies, magnitude = 1.0 / base**exponents, 1.0
    const float pow_2 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate_2, 2LL)), 128.0f));
    const float where_1 = coordinate_3 ? static_cast<float>(position_ids_2) * fast_divide(1.0f, pow_2) : static_cast<float>(position_ids) * fast_divide(1.0f, pow_1);
    return round_bf16(q * cosf(where_1) + (coordinate_3 ? -q_3 : q_2) * sinf(where_1));  // line 17: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* q_ptr, const i64* position_ids_ptr, bf16* out_0_ptr, i64 q_dim0, i64 q_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = q_dim0 * q_dim1 * 524288;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 q_raw[UNROLL][LANES];
    i64 position_ids_raw[UNROLL][LANES] = {};
    i64 position_ids_2_raw[UNROLL][LANES] = {};
    bf16 q_2_raw[UNROLL][LANES] = {};
    bf16 q_3_raw[UNROLL][LANES] = {};
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / q_dim1;
        const Index i1 = i2_outer - i0 * q_dim1;
        load_lanes<8>(q_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3);
        for (i32 v = 0; v < 8; ++v) if (i3 + v >= 64) position_ids_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        for (i32 v = 0; v < 8; ++v) if (i3 + v < 64) position_ids_2_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        if (i3 >= 64) load_lanes<8>(q_2_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3 - 64);
        if (i3 < 64) load_lanes<8>(q_3_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / q_dim1;
        const Index i1 = i2_outer - i0 * q_dim1;
        float q[8];
        widen_vec(q_raw[u], q);
        i64 position_ids[8];
        widen_vec(position_ids_raw[u], position_ids);
        i64 position_ids_2[8];
        widen_vec(position_ids_2_raw[u], position_ids_2);
        float q_2[8];
        widen_vec(q_2_raw[u], q_2);
        float q_3[8];
        widen_vec(q_3_raw[u], q_3);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_position_ids_0(q[v], position_ids[v], position_ids_2[v], q_2[v], q_3[v], i3 + v - 64, i3 + v, i3 + v < 64);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_0_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3, result_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_position_ids_1(float k_, i64 position_ids, i64 position_ids_2, float k__2, float k__3, i64 coordinate, i64 coordinate_2, bool coordinate_3) {
    const float pow_1 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate, 2LL)), 128.0f));  // line 37: frequencies, magnitude = 1.0 / base**exponents, 1.0
    const float pow_2 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate_2, 2LL)), 128.0f));
    const float where_1 = coordinate_3 ? static_cast<float>(position_ids_2) * fast_divide(1.0f, pow_2) : static_cast<float>(position_ids) * fast_divide(1.0f, pow_1);
    return round_bf16(k_ * cosf(where_1) + (coordinate_3 ? -k__3 : k__2) * sinf(where_1));  // line 17: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* k_ptr, const i64* position_ids_ptr, bf16* out_1_ptr, i64 k_dim1, i64 q_dim0) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = k_dim1 * q_dim0 * 524288;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 k__raw[UNROLL][LANES];
    i64 position_ids_raw[UNROLL][LANES] = {};
    i64 position_ids_2_raw[UNROLL][LANES] = {};
    bf16 k__2_raw[UNROLL][LANES] = {};
    bf16 k__3_raw[UNROLL][LANES] = {};
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / k_dim1;
        const Index i1 = i2_outer - i0 * k_dim1;
        load_lanes<8>(k__raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3);
        for (i32 v = 0; v < 8; ++v) if (i3 + v >= 64) position_ids_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        for (i32 v = 0; v < 8; ++v) if (i3 + v < 64) position_ids_2_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        if (i3 >= 64) load_lanes<8>(k__2_raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3 - 64);
        if (i3 < 64) load_lanes<8>(k__3_raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / k_dim1;
        const Index i1 = i2_outer - i0 * k_dim1;
        float k_[8];
        widen_vec(k__raw[u], k_);
        i64 position_ids[8];
        widen_vec(position_ids_raw[u], position_ids);
        i64 position_ids_2[8];
        widen_vec(position_ids_2_raw[u], position_ids_2);
        float k__2[8];
        widen_vec(k__2_raw[u], k__2);
        float k__3[8];
        widen_vec(k__3_raw[u], k__3);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_position_ids_1(k_[v], position_ids[v], position_ids_2[v], k__2[v], k__3[v], i3 + v - 64, i3 + v, i3 + v < 64);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_1_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3, result_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_rotary_position_ids_0_to_1(i64 blocks_1, const bf16* q_ptr, const i64* position_ids_ptr, bf16* out_0_ptr, const bf16* k_ptr, bf16* out_1_ptr, i64 q_dim0, i64 q_dim1, i64 k_dim1) {
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), q_ptr, position_ids_ptr, out_0_ptr, q_dim0, q_dim1);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, k_ptr, position_ids_ptr, out_1_ptr, k_dim1, q_dim0);
}
