// layer_norm_invertible_backward_0_combine: combination of the column sums, emitted by fusegen for sm_90a.
// Grid 128, block 1024, 16384 bytes of shared memory.
// Reads (4 * min(y_dim0, 264)) * 4096 + (4 * min(y_dim0, 264)) * 4096 bytes, writes 16384.
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(1024)
fg_layer_norm_invertible_backward_0_combine(const float* partial_20_ptr, const float* partial_22_ptr, bf16* out_1_ptr, bf16* out_2_ptr, i64 y_dim0) {
    wait_for_previous();
    constexpr i32 COLUMNS = 32;
    constexpr i32 ROWS = 32;
    constexpr i32 PARTS = 264;
    const Index row_blocks = y_dim0;
    const Index part_count = row_blocks < PARTS ? row_blocks : PARTS;  // no other block had rows
    const Index column_count = 4096;
    const i32 lane = thread_id() % COLUMNS;
    const i32 row = thread_id() / COLUMNS;
    const Index column = static_cast<Index>(block_id()) * COLUMNS + lane;
    auto column_total_shared = shared_array<float>(0);
    float column_total = sum_f32_identity();
    if (column < column_count) {
        for (Index part = row; part < part_count; part += ROWS) column_total = sum_f32_combine(column_total, load(partial_20_ptr, part * 4096 + column));
    }
    shared_store(column_total_shared, row * COLUMNS + lane, column_total);
    auto column_total_2_shared = shared_array<float>(8192);
    float column_total_2 = sum_f32_identity();
    if (column < column_count) {
        for (Index part = row; part < part_count; part += ROWS) column_total_2 = sum_f32_combine(column_total_2, load(partial_22_ptr, part * 4096 + column));
    }
    shared_store(column_total_2_shared, row * COLUMNS + lane, column_total_2);
    // By halves, which is more accurate than in turn.
#pragma unroll
    for (i32 half = ROWS / 2; half > 0; half /= 2) {
        block_sync();
        if (row < half) {
            column_total = sum_f32_combine(column_total, shared_load(column_total_shared, (row + half) * COLUMNS + lane));
            shared_store(column_total_shared, row * COLUMNS + lane, column_total);
            column_total_2 = sum_f32_combine(column_total_2, shared_load(column_total_2_shared, (row + half) * COLUMNS + lane));
            shared_store(column_total_2_shared, row * COLUMNS + lane, column_total_2);
        }
    }
    if (row > 0 || column >= column_count) return;
    bf16 column_total_narrow;
    narrow(column_total, column_total_narrow);
    store(out_1_ptr, column, column_total_narrow);
    bf16 column_total_2_narrow;
    narrow(column_total_2, column_total_2_narrow);
    store(out_2_ptr, column, column_total_2_narrow);
}
