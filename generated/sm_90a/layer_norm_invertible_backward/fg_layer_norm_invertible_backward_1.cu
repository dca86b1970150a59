// layer_norm_invertible_backward_1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 1, block 128.
// Reads 8 bytes, writes 1.
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

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }

// narrow() for arrays; 16-bit floats are converted in pairs, one instruction for two elements.
template <int N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
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

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
}

// Waits until the launch before this one has completed and all that it wrote can be seen. Where the launch does not overlap with that,
// it returns at once.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ bool widen(bool x) { return x; }

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

extern "C" __global__ void __launch_bounds__(128)
fg_layer_norm_invertible_backward_1(const i64* value_27_ptr, bool* out_3_ptr) {
    wait_for_previous();
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 1;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

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
    if (block_id() == block_count() - 1 && position < element_count) {
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
