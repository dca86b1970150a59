// log_softmax: row reduction, 3 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid input_dim0, block 128, 128 bytes of shared memory: a row fits the registers of 128 threads, 32 elements each.
// Reads input_dim0 * 8192 bytes, writes input_dim0 * 8192.
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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
  return static_cast<i32>(blockIdx.x);
}

// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
  __syncthreads();
}

// e^x within about 2 + |1.2 x| units in the last place; subnormal results become zero.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
  return static_cast<i32>(threadIdx.x & 31u);
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

// The larger of two values; NaN if either is NaN.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
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

// Index of this thread's warp in its block.
__device__ __forceinline__ i32 warp_id() {
  return static_cast<i32>(threadIdx.x >> 5);
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float amax_f32_identity() {
    return -bit_cast<float>(0x7f800000u);
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ float log_softmax_1(float input, float largest) {
    return fast_exp(input - largest);                                                 // line 7: return F.log_softmax(cooled(input, temperature), dim)
}

__device__ __forceinline__ float log_softmax_row_2(float total) {
    return logf(total);                                                               // line 7: return F.log_softmax(cooled(input, temperature), dim)
}

__device__ __forceinline__ float log_softmax_2(float input, float largest, float row_value) {
    return input - largest - row_value;                                               // line 7: return F.log_softmax(cooled(input, temperature), dim)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 128;  // that share a row
constexpr i32 MEETING = 4;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before
constexpr i32 CHUNKS = 4;  // groups of lanes that a thread holds

// Leaves a warp's part of what the threads of a row combine; row_amax_f32_meet takes all parts, behind a barrier.
template <typename Scratch>
__device__ __forceinline__ void row_amax_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the parts of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_amax_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

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

extern "C" __global__ void __launch_bounds__(128, 8)
fg_log_softmax(const bf16* input_ptr, bf16* out_ptr, i64 input_dim0) {
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 3: reduces each row to largest.
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(input_raw[c], input_ptr, row * 4096 + column);
    }
    float largest_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float input[LANES];
        widen_vec(input_raw[c], input);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], input[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
    }
    float largest = largest_of[0];
    row_amax_f32_leave(largest, shared_array<float>(0));
    block_sync();
    largest = row_amax_f32_meet(shared_array<float>(0));

    // Phase 2 of 3: reduces each row to total.
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float input[LANES];
        widen_vec(input_raw[c], input);
        float total_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_part[v] = log_softmax_1(input[v], largest);
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
    }
    float total = total_of[0];
    row_sum_f32_leave(total, shared_array<float>(64));
    block_sync();
    total = row_sum_f32_meet(shared_array<float>(64));

    // Phase 3 of 3: computes row_value; writes out.
    const float row_value = log_softmax_row_2(total);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float input[LANES];
        widen_vec(input_raw[c], input);
        float result_0[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result_0[v] = log_softmax_2(input[v], largest, row_value);
        }
        bf16 result_0_raw[LANES];
        narrow_vec(result_0, result_0_raw);
        store_lanes<8>(out_ptr, row * 4096 + column, result_0_raw);
    }
}
