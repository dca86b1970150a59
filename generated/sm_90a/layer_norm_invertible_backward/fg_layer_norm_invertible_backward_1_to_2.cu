// layer_norm_invertible_backward_1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 1, block 128.
// Reads 8 bytes, writes 1.
// layer_norm_invertible_backward_2: row and column reduction, 2 phases, rows read once, staged in shared memory, emitted by fusegen for sm_90a.
// Grid min(y_dim0, 264) * 1, block 128, 65664 bytes of shared memory: the next rows come to shared memory while the columns of this one are added up in registers.
// Reads y_dim0 * 16388 + 16384 bytes, writes y_dim0 * 8192 + 16384.
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

// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
  __syncthreads();
}

// Shared-memory address: the 32-bit form of a pointer to shared memory that PTX operands expect.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Starts copying W elements (4, 8 or 16 bytes, aligned so) from global to shared memory; see copy_async_wait. Those of 16 bytes
// leave the first-level cache to what is read again.
template <int W, typename T>
__device__ __forceinline__ void copy_async(T* to, i32 i, const T* base, i64 j) {
  if constexpr (W * sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(base + j));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to + i)), "l"(base + j), "n"(W * sizeof(T)));
  }
}

// Closes a group of this thread's asynchronous copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most PENDING of this thread's groups of copies are under way; it may then read what the others brought.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
  return static_cast<i32>(threadIdx.x & 31u);
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
__device__ __forceinline__ bool load(const bool* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bool>(static_cast<u8>(bits));
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
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }

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

// The value itself, but the compiler no longer knows where it comes from: what depends on it is not hoisted out of a
// loop, where it would hold registers.
__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The part of the block's dynamic shared memory that starts at `byte_offset`, as an array of T. Take it with `auto`.
template <typename T>
__device__ __forceinline__ T* shared_array(u32 byte_offset) {
  extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory + byte_offset);
}

// Element i of an array in this block's shared memory.
template <typename T>
__device__ __forceinline__ T shared_load(const T* array, i32 i) {
  return array[i];
}

// N consecutive elements from shared memory, aligned to their size (16 bytes at most).
template <int N, typename T>
__device__ __forceinline__ void shared_load_vec(T (&dst)[N], const T* from, i32 i) {
  constexpr i32 bytes = N * sizeof(T);
  if constexpr (bytes % 16 != 0) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) dst[k] = shared_load(from, i + k);
  } else {
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3])
                   : "r"(shared_address(from + i) + w * 4));
    }
    memcpy(dst, words, bytes);
  }
}

// Sets element i of an array in this block's shared memory.
template <typename T>
__device__ __forceinline__ void shared_store(T* array, i32 i, T value) {
  array[i] = value;
}

// The value that the lane with index `lane_id() ^ mask` passes. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// One element to global memory.
__device__ __forceinline__ void store(bool* base, i64 i, bool value) {
  u16 bits = bit_cast<u8>(value);
  asm volatile("st.global.u8 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(i64* base, i64 i, i64 value) {
  u64 bits = bit_cast<u64>(value);
  asm volatile("st.global.b64 [%0], %1;" :: "l"(base + i), "l"(bits) : "memory");
}
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
  u16 bits = bit_cast<u16>(value);
  asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(float* base, i64 i, float value) {
  u32 bits = bit_cast<u32>(value);
  asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
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

// Waits until the launch before this one has completed and all that it wrote can be seen. Where the launch does not overlap with that,
// it returns at once.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Index of this thread's warp in its block.
__device__ __forceinline__ i32 warp_id() {
  return static_cast<i32>(threadIdx.x >> 5);
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ bool widen(bool x) { return x; }

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
__device__ __forceinline__ bool layer_norm_invertible_backward_1(i64 value_27) {
    return value_27 != 0;                                                             // line 12: return dx.to(y.dtype), (dy * normalized).sum(0), dy.sum(0), (weight == …
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const i64* value_27_ptr, bool* out_3_ptr) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 1;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    i64 value_27_raw[UNROLL];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        value_27_raw[u] = load(value_27_ptr, 0);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const i64 value_27 = widen(value_27_raw[u]);
        bool result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = layer_norm_invertible_backward_1(value_27);
        bool result_raw[8];
        narrow_vec(result, result_raw);
        store(out_3_ptr, 0, result_raw[0]);
    }

    // What is left at the end is less than a group of lanes.
    const Index position = element_count / LANES * LANES + thread_id();
    if (block == blocks - 1 && position < element_count) {
        i64 value_27_raw;
        value_27_raw = load(value_27_ptr, 0);
        const i64 value_27 = widen(value_27_raw);
        bool result[1];
        for (i32 v = 0; v < 1; ++v) result[v] = layer_norm_invertible_backward_1(value_27);
        bool result_raw[1];
        narrow_vec(result, result_raw);
        store(out_3_ptr, 0, result_raw[0]);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ void layer_norm_invertible_backward_2_0(float dy, float weight, float y, float bias, float& total_part, float& total_2_part, float& column_total_part) {
    const float mul_1 = dy * weight;                                                  // line 11: dx = _input_gradient(normalized, rstd, dy * weight)
    const float div_1 = fast_divide(y - bias, weight);                                // line 10: normalized = (y - bias) / weight
    total_part = mul_1;                                                               // line 11: dx = _input_gradient(normalized, rstd, dy * weight)
    total_2_part = mul_1 * div_1;                                                     // line 2: return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad …
    column_total_part = dy * div_1;                                                   // line 12: return dx.to(y.dtype), (dy * normalized).sum(0), dy.sum(0), (weight == …
}

__device__ __forceinline__ void layer_norm_invertible_backward_2_row_1(float total, float total_2, float& mean, float& mean_2) {
    mean = total * 0.000244140625f;                                                   // line 2: return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad …
    mean_2 = total_2 * 0.000244140625f;
}

__device__ __forceinline__ float layer_norm_invertible_backward_2_1(float dy, float y, float rstd, float mean, float mean_2, float weight, float bias) {
    return rstd * (dy * weight - mean - fast_divide(y - bias, weight) * mean_2);      // line 2: return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad …
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 128;  // that share a row
constexpr i32 WARPS = 4;
constexpr i32 MEETING = 4;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before
constexpr i32 CHUNKS = 4;  // groups of lanes that a thread holds
constexpr i32 SLOTS = 16;  // groups of lanes that a thread has room for in shared memory, used in turn
constexpr i32 AHEAD = SLOTS - CHUNKS;  // how many of them belong to later rows
constexpr i32 SLOT = THREADS * LANES;  // elements from one slot to the next

// Leaves a warp's part of what the threads of a row combine; row_sum_f32_meet takes all parts, behind a barrier.
template <typename Scratch>
__device__ __forceinline__ void row_sum_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the parts of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* dy_ptr, const bf16* weight_ptr, const bf16* y_ptr, const bf16* bias_ptr, const float* rstd_ptr, bf16* out_0_ptr, float* partial_20_ptr, float* partial_22_ptr, i64 y_dim0) {
    const Index row_count = y_dim0;
    const i32 thread = thread_id();
    // This block's share of the rows; its column sums become row `part` of the workspace.
    constexpr i32 PARTS = 264;  // at most: there are no blocks without rows
    const Index part = block;
    float column_total[CHUNKS][LANES];
    for (i32 c = 0; c < CHUNKS; ++c)
        for (i32 v = 0; v < LANES; ++v) column_total[c][v] = sum_f32_identity();
    float column_total_2[CHUNKS][LANES];
    for (i32 c = 0; c < CHUNKS; ++c)
        for (i32 v = 0; v < LANES; ++v) column_total_2[c][v] = sum_f32_identity();
    i32 turn = 0;  // rows alternate between two slots of scratch, so that one barrier a phase is enough
    auto dy_staged = shared_array<bf16>(128);
    auto y_staged = shared_array<bf16>(32896);
    i32 base = 0;  // the slot of the row's first group
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // those of a row lie side by side; no register keeps where
    // Starts the copy of group c of a row; one that does not exist still counts as a group of copies.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count) {
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(dy_staged, slot * SLOT + thread * LANES + v, dy_ptr, row * 4096 + column + v);
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(y_staged, slot * SLOT + thread * LANES + v, y_ptr, row * 4096 + column + v);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    // What all rows share, as it lies in memory.
    bf16 weight_raw[CHUNKS][LANES];
    bf16 bias_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(weight_raw[c], weight_ptr, column);
        load_lanes<8>(bias_raw[c], bias_ptr, column);
    }
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 2: reduces each row to total, total_2; adds to column_total, column_total_2 of each column.
        const float rstd = widen(load(rstd_ptr, row));
        float total_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
        float total_2_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_2_of[k] = sum_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float bias[LANES];
            widen_vec(bias_raw[c], bias);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            float y[LANES];
            bf16 y_raw[LANES];
            shared_load_vec(y_raw, y_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(y_raw, y);
            float total_part[LANES];
            float total_2_part[LANES];
            float column_total_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                layer_norm_invertible_backward_2_0(dy[v], weight[v], y[v], bias[v], total_part[v], total_2_part[v], column_total_part[v]);
                total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
                total_2_of[v % SUMS] = sum_f32_combine(total_2_of[v % SUMS], total_2_part[v]);
                column_total[c][v] = sum_f32_combine(column_total[c][v], column_total_part[v]);
                column_total_2[c][v] = sum_f32_combine(column_total_2[c][v], dy[v]);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
        }
        float total = total_of[0];
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_2_of[k] = sum_f32_combine(total_2_of[k], total_2_of[k + half]);
        }
        float total_2 = total_2_of[0];
        row_sum_f32_leave(total, shared_array<float>(0) + turn * WARPS);
        row_sum_f32_leave(total_2, shared_array<float>(64) + turn * WARPS);
        block_sync();
        total = row_sum_f32_meet(shared_array<float>(0) + turn * WARPS);
        total_2 = row_sum_f32_meet(shared_array<float>(64) + turn * WARPS);

        // Phase 2 of 2: computes mean, mean_2; writes out_0.
        float mean;
        float mean_2;
        layer_norm_invertible_backward_2_row_1(total, total_2, mean, mean_2);
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float bias[LANES];
            widen_vec(bias_raw[c], bias);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            float y[LANES];
            bf16 y_raw[LANES];
            shared_load_vec(y_raw, y_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(y_raw, y);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the slot is free again
            float result_0[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                result_0[v] = layer_norm_invertible_backward_2_1(dy[v], y[v], rstd, mean, mean_2, weight[v], bias[v]);
            }
            bf16 result_0_raw[LANES];
            narrow_vec(result_0, result_0_raw);
            store_lanes<8>(out_0_ptr, row * 4096 + column, result_0_raw);
        }
        turn ^= 1;
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        store_lanes<4>(partial_20_ptr, part * 4096 + column, column_total[c]);
        store_lanes<4>(partial_22_ptr, part * 4096 + column, column_total_2[c]);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 2)
fg_layer_norm_invertible_backward_1_to_2(i64 blocks_1, const i64* value_27_ptr, bool* out_3_ptr, const bf16* dy_ptr, const bf16* weight_ptr, const bf16* y_ptr, const bf16* bias_ptr, const float* rstd_ptr, bf16* out_0_ptr, float* partial_20_ptr, float* partial_22_ptr, i64 y_dim0) {
    wait_for_previous();
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), value_27_ptr, out_3_ptr);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, dy_ptr, weight_ptr, y_ptr, bias_ptr, rstd_ptr, out_0_ptr, partial_20_ptr, partial_22_ptr, y_dim0);
}
