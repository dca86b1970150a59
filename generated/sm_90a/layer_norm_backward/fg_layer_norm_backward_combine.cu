// layer_norm_backward_combine: combination of column sums, emitted by fusegen for sm_90a.
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

// A TMA descriptor as the driver encodes it; passed to a kernel by value.
struct alignas(64) TensorMap { u64 opaque[16]; };

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
template <typename T>
__device__ __forceinline__ T load(const T* base, i64 i) {
  const T* from = base + i;
  if constexpr (sizeof(T) == 8) {
    u64 bits;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 2) {
    u16 bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else {
    u16 bits;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(from));
    return bit_cast<T>(static_cast<u8>(bits));
  }
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, f16& out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(double value, float& out) { out = static_cast<float>(value); }
// Through float, as torch does; the second rounding is part of its semantics.
__device__ __forceinline__ void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
__device__ __forceinline__ void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }
__device__ __forceinline__ void narrow(i64 value, i8& out) { out = static_cast<i8>(value); }
__device__ __forceinline__ void narrow(i64 value, u8& out) { out = static_cast<u8>(value); }
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
__device__ __forceinline__ void narrow(i64 value, i32& out) { out = static_cast<i32>(value); }
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }

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
template <typename T>
__device__ __forceinline__ void store(T* base, i64 i, T value) {
  T* to = base + i;
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.b64 [%0], %1;" :: "l"(to), "l"(bit_cast<u64>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.b32 [%0], %1;" :: "l"(to), "r"(bit_cast<u32>(value)) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.b16 [%0], %1;" :: "l"(to), "h"(bit_cast<u16>(value)) : "memory");
  } else {
    u16 bits = bit_cast<u8>(value);
    asm volatile("st.global.u8 [%0], %1;" :: "l"(to), "h"(bits) : "memory");
  }
}

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
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

extern "C" __global__ void __launch_bounds__(256)
fg_layer_norm_backward_combine(const float* partial_25_ptr, const float* partial_27_ptr, bf16* out_1_ptr, bf16* out_2_ptr) {
    constexpr i32 COLUMNS = 32;
    constexpr i32 ROWS = 8;
    constexpr i32 PARTS = 264;
    const Index column_count = 4096;
    const i32 lane = thread_id() % COLUMNS;
    const i32 row = thread_id() / COLUMNS;
    const Index column = static_cast<Index>(block_id()) * COLUMNS + lane;
    auto sum_25_shared = shared_array<float>(0);
    float sum_25 = sum_f32_identity();
    if (column < column_count) {
        for (Index part = row; part < PARTS; part += ROWS) sum_25 = sum_f32_combine(sum_25, load(partial_25_ptr, part * 4096 + column));
    }
    shared_store(sum_25_shared, row * COLUMNS + lane, sum_25);
    auto sum_27_shared = shared_array<float>(2048);
    float sum_27 = sum_f32_identity();
    if (column < column_count) {
        for (Index part = row; part < PARTS; part += ROWS) sum_27 = sum_f32_combine(sum_27, load(partial_27_ptr, part * 4096 + column));
    }
    shared_store(sum_27_shared, row * COLUMNS + lane, sum_27);
    block_sync();
    if (row > 0 || column >= column_count) return;
    for (i32 k = 1; k < ROWS; ++k) sum_25 = sum_f32_combine(sum_25, shared_load(sum_25_shared, k * COLUMNS + lane));
    bf16 sum_25_narrow;
    narrow(sum_25, sum_25_narrow);
    store(out_1_ptr, column, sum_25_narrow);
    for (i32 k = 1; k < ROWS; ++k) sum_27 = sum_f32_combine(sum_27, shared_load(sum_27_shared, k * COLUMNS + lane));
    bf16 sum_27_narrow;
    narrow(sum_27, sum_27_narrow);
    store(out_2_ptr, column, sum_27_narrow);
}
