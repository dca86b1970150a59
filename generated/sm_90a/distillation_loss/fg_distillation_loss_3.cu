// distillation_loss_3: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 1, block 128.
// Reads 4 bytes, writes 2.
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

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ float widen(float x) { return x; }

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float distillation_loss_3(float value_23, i64 coordinate, float scalar_1) {
    return fast_divide(value_23, static_cast<float>(coordinate)) * scalar_1;          // line 13: return F.kl_div(approximation, wanted, log_target=True, reduction="batc…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_distillation_loss_3(const float* value_23_ptr, bf16* out_ptr, i64 student_dim0, double scalar_1) {
    wait_for_previous();
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 1;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    float value_23_raw[UNROLL];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        value_23_raw[u] = load(value_23_ptr, 0);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const float value_23 = widen(value_23_raw[u]);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = distillation_loss_3(value_23, student_dim0, scalar_1);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store(out_ptr, 0, result_raw[0]);
    }

    // What is left at the end is less than a group of lanes.
    const Index position = element_count / LANES * LANES + thread_id();
    if (block_id() == block_count() - 1 && position < element_count) {
        float value_23_raw;
        value_23_raw = load(value_23_ptr, 0);
        const float value_23 = widen(value_23_raw);
        float result[1];
        for (i32 v = 0; v < 1; ++v) result[v] = distillation_loss_3(value_23, student_dim0, scalar_1);
        bf16 result_raw[1];
        narrow_vec(result, result_raw);
        store(out_ptr, 0, result_raw[0]);
    }
}
