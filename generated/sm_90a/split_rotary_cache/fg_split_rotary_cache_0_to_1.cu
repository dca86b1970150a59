// split_rotary_cache_0: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 4096, block 128.
// Reads 2129920 + min(8388608, 25165824) * 2 bytes, writes 16777216.
// split_rotary_cache_1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 16384, block 128.
// Reads 2097152 + min(16777216, 25165824) * 2 bytes, writes 33554432.
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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
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

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
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

// Ends the launch: the next synchronisation raises cudaErrorAssert, and the message is printed.
extern "C" __device__ void __assertfail(const char*, const char*, u32, const char*, unsigned long) __attribute__((noreturn));
__device__ __noinline__ void refuse_index(const char* message) { __assertfail(message, "fusegen", 0, "", 1); }

// An index that was read, if it is in [0, extent); else the launch ends with a device assert.
__device__ __forceinline__ i64 checked_index(i64 index, i64 extent, const char* message) {
  if (index < 0 || index >= extent) refuse_index(message);
  return index;
}

// As checked_index; a negative index counts from the end.
__device__ __forceinline__ i64 wrapped_index(i64 index, i64 extent, const char* message) {
  return checked_index(index < 0 ? index + extent : index, extent, message);
}

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void split_rotary_cache_0(float qkv, float qkv_2, float cos_, float qkv_3, float qkv_4, float sin_, bool coordinate, float& result, float& result_2) {
    result = qkv;                                                                     // line 33: v_cache.view(-1, *v_cache.shape[2:])[slots] = v[0].transpose(0, 1).to(v…
    result_2 = qkv_2 * cos_ + (coordinate ? -qkv_4 : qkv_3) * sin_;                   // line 32: k_cache.view(-1, *k_cache.shape[2:])[slots] = k[0].transpose(0, 1).to(k…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* qkv_ptr, const bf16* cos_ptr, const bf16* sin_ptr, const i64* slots_ptr, bf16* v_cache_ptr, bf16* k_cache_ptr, i64 k_cache_dim0, i64 k_cache_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 4194304;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 qkv_raw[UNROLL][LANES];
    bf16 qkv_2_raw[UNROLL][LANES];
    bf16 cos__raw[UNROLL][LANES];
    bf16 qkv_3_raw[UNROLL][LANES] = {};
    bf16 qkv_4_raw[UNROLL][LANES] = {};
    bf16 sin__raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_outer = position / 128;
        const Index i2 = position - i2_outer * 128;
        const Index i0 = i2_outer / 8;
        const Index i1 = i2_outer - i0 * 8;
        load_lanes<8>(qkv_raw[u], qkv_ptr, i1 * 128 + i0 * 6144 + i2 + 5120);
        load_lanes<8>(qkv_2_raw[u], qkv_ptr, i1 * 128 + i0 * 6144 + i2 + 4096);
        load_lanes<8>(cos__raw[u], cos_ptr, i0 * 128 + i2);
        if (i2 >= 64) load_lanes<8>(qkv_3_raw[u], qkv_ptr, i1 * 128 + i0 * 6144 + i2 + 4032);
        if (i2 < 64) load_lanes<8>(qkv_4_raw[u], qkv_ptr, i1 * 128 + i0 * 6144 + i2 + 4160);
        load_lanes<8>(sin__raw[u], sin_ptr, i0 * 128 + i2);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i2_outer = position / 128;
        const Index i2 = position - i2_outer * 128;
        const Index i0 = i2_outer / 8;
        const Index i1 = i2_outer - i0 * 8;
        const Index v_cache_at = wrapped_index(widen(load_once(slots_ptr, i0)), k_cache_dim0 * k_cache_dim1, "fusegen: split_rotary_cache_0: index of 'v_cache' out of range [-(k_cache_dim0 * k_cache_dim1), k_cache_dim0 * k_cache_dim1)");
        const Index k_cache_at = wrapped_index(widen(load_once(slots_ptr, i0)), k_cache_dim0 * k_cache_dim1, "fusegen: split_rotary_cache_0: index of 'k_cache' out of range [-(k_cache_dim0 * k_cache_dim1), k_cache_dim0 * k_cache_dim1)");
        float qkv[8];
        widen_vec(qkv_raw[u], qkv);
        float qkv_2[8];
        widen_vec(qkv_2_raw[u], qkv_2);
        float cos_[8];
        widen_vec(cos__raw[u], cos_);
        float qkv_3[8];
        widen_vec(qkv_3_raw[u], qkv_3);
        float qkv_4[8];
        widen_vec(qkv_4_raw[u], qkv_4);
        float sin_[8];
        widen_vec(sin__raw[u], sin_);
        float result[8];
        float result_2[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) split_rotary_cache_0(qkv[v], qkv_2[v], cos_[v], qkv_3[v], qkv_4[v], sin_[v], i2 + v < 64, result[v], result_2[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(v_cache_ptr, v_cache_at * 1024 + i1 * 128 + i2, result_raw);
        bf16 result_2_raw[8];
        narrow_vec(result_2, result_2_raw);
        store_lanes<8>(k_cache_ptr, k_cache_at * 1024 + i1 * 128 + i2, result_2_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float split_rotary_cache_1(float qkv, float cos_, float qkv_2, float qkv_3, float sin_, bool coordinate) {
    return qkv * cos_ + (coordinate ? -qkv_3 : qkv_2) * sin_;                         // line 17: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* qkv_ptr, const bf16* cos_ptr, const bf16* sin_ptr, bf16* out_ptr) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 16777216;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 qkv_raw[UNROLL][LANES];
    bf16 cos__raw[UNROLL][LANES];
    bf16 qkv_2_raw[UNROLL][LANES] = {};
    bf16 qkv_3_raw[UNROLL][LANES] = {};
    bf16 sin__raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / 32;
        const Index i1 = i2_outer - i0 * 32;
        load_lanes<8>(qkv_raw[u], qkv_ptr, i1 * 128 + i2 * 6144 + i3);
        load_lanes<8>(cos__raw[u], cos_ptr, i2 * 128 + i3);
        if (i3 >= 64) load_lanes<8>(qkv_2_raw[u], qkv_ptr, i1 * 128 + i2 * 6144 + i3 - 64);
        if (i3 < 64) load_lanes<8>(qkv_3_raw[u], qkv_ptr, i1 * 128 + i2 * 6144 + i3 + 64);
        load_lanes<8>(sin__raw[u], sin_ptr, i2 * 128 + i3);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / 32;
        const Index i1 = i2_outer - i0 * 32;
        float qkv[8];
        widen_vec(qkv_raw[u], qkv);
        float cos_[8];
        widen_vec(cos__raw[u], cos_);
        float qkv_2[8];
        widen_vec(qkv_2_raw[u], qkv_2);
        float qkv_3[8];
        widen_vec(qkv_3_raw[u], qkv_3);
        float sin_[8];
        widen_vec(sin__raw[u], sin_);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = split_rotary_cache_1(qkv[v], cos_[v], qkv_2[v], qkv_3[v], sin_[v], i3 + v < 64);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, i1 * 128 + i0 * 4096 + i2 * 4096 + i3, result_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_split_rotary_cache_0_to_1(i64 blocks_1, const bf16* qkv_ptr, const bf16* cos_ptr, const bf16* sin_ptr, const i64* slots_ptr, bf16* v_cache_ptr, bf16* k_cache_ptr, bf16* out_ptr, i64 k_cache_dim0, i64 k_cache_dim1) {
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), qkv_ptr, cos_ptr, sin_ptr, slots_ptr, v_cache_ptr, k_cache_ptr, k_cache_dim0, k_cache_dim1);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, qkv_ptr, cos_ptr, sin_ptr, out_ptr);
}
