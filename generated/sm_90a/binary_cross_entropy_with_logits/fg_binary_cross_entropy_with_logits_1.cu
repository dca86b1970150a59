// binary_cross_entropy_with_logits_1: row reduction, 2 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid 1, block 992, 496 bytes of shared memory: a row fits the registers of 992 threads, 17 elements each.
// Reads input_dim0 * 4 bytes, writes 2.
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

// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
  __syncthreads();
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

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

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

// One element to global memory.
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
  u16 bits = bit_cast<u16>(value);
  asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(float* base, i64 i, float value) {
  u32 bits = bit_cast<u32>(value);
  asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
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
__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ float binary_cross_entropy_with_logits_1_row_1(float total, i64 coordinate) {
    return fast_divide(total, static_cast<float>(coordinate));                        // line 9: return F.binary_cross_entropy_with_logits(input, target, weight, reduct…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 1;  // neighbours that one access moves
constexpr i32 THREADS = 992;  // that share a row
constexpr i32 WARPS = 31;
constexpr i32 MEETING = 32;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 1;  // that a thread has under way of what it reduces: an addition need not wait for the one before
constexpr i32 CHUNKS = 17;  // groups of lanes that a thread holds

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
    float value = sum_f32_identity();
    if (warp < WARPS) value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(992, 2)
fg_binary_cross_entropy_with_logits_1(const float* value_23_ptr, bf16* out_ptr, i64 input_dim0) {
    wait_for_previous();
    const Index column_count = input_dim0;
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 2: reduces each row to total.
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const Index i0 = column / 1;
        float value_23_raw[LANES];
        for (i32 v = 0; v < 1; ++v) value_23_raw[v] = load(value_23_ptr, i0);
        float value_23[LANES];
        widen_vec(value_23_raw, value_23);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], value_23[v]);
        }
    }
    float total = total_of[0];
    row_sum_f32_leave(total, shared_array<float>(0));
    block_sync();
    total = row_sum_f32_meet(shared_array<float>(0));

    // Phase 2 of 2: computes row_value; writes out.
    const float row_value = binary_cross_entropy_with_logits_1_row_1(total, input_dim0 * 4096);
    if (thread == 0) {
        bf16 narrowed;
        narrow(row_value, narrowed);
        store(out_ptr, 0, narrowed);
    }
}
