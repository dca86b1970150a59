// add_rms_norm_quant: row reduction, 3 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid x_dim0, block 128, 128 bytes of shared memory: a row fits the registers of 128 threads, 32 elements each.
// Reads x_dim0 * 16384 + 8192 bytes, writes x_dim0 * 12292.
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
struct f8e4m3 { u8 bits; };

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

// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 1 / sqrt(x), relative error below 2^-22.
__device__ __forceinline__ float fast_rsqrt(float x) {
  float result;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
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

// The larger of two values; NaN if either is NaN.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The smaller of two values; NaN if either is NaN.
__device__ __forceinline__ float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, f8e4m3& out) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  out.bits = static_cast<u8>(pair);
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
template <int N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], f8e4m3 (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(src[k + 1]), "f"(src[k]));
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

// One element to global memory.
__device__ __forceinline__ void store(f8e4m3* base, i64 i, f8e4m3 value) {
  u16 bits = bit_cast<u8>(value);
  asm volatile("st.global.u8 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
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

// Index of this thread's warp in its block.
__device__ __forceinline__ i32 warp_id() {
  return static_cast<i32>(threadIdx.x >> 5);
}

// The floats of two f8e4m3 in one register, `low` of the lower half, where instructions convert them.
__device__ __forceinline__ void widen_e4m3x2(u16 pair, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<u16>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<u16>(halves >> 16)));
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ float widen(f8e4m3 x) {
  float result, unused;
  widen_e4m3x2(x.bits, result, unused);
  return result;
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
template <int N>
__device__ __forceinline__ void widen_vec(const f8e4m3 (&src)[N], float (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u16 pair;
    memcpy(&pair, &src[k], sizeof(pair));
    widen_e4m3x2(pair, dst[k], dst[k + 1]);
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

__device__ __forceinline__ float amax_f32_identity() {
    return -bit_cast<float>(0x7f800000u);
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ void add_rms_norm_quant_0(float x, float residual, float& squares_part, float& result_2) {
    const float add_1 = x + residual;                                                 // line 26: h = x + residual
    squares_part = add_1 * add_1;                                                     // line 18: return F.rms_norm(x, (x.shape[-1],), weight, eps)
    result_2 = add_1;                                                                 // line 26: h = x + residual
}

__device__ __forceinline__ float add_rms_norm_quant_row_1(float squares, float eps) {
    return fast_rsqrt(squares * 0.000244140625f + eps);                               // line 18: return F.rms_norm(x, (x.shape[-1],), weight, eps)
}

__device__ __forceinline__ float add_rms_norm_quant_1(float x, float residual, float rstd, float weight) {
    return fabsf((x + residual) * rstd * weight);                                     // line 30: found = wide.abs().amax(dims, keepdim=granularity != "per_tensor").clam…
}

__device__ __forceinline__ void add_rms_norm_quant_row_2(float largest, float& found, float& row_value) {
    const float mul_1 = maximum(largest, 1e-10f) * 0.002232142857142857f;             // line 30: found = wide.abs().amax(dims, keepdim=granularity != "per_tensor").clam…
    found = mul_1;
    row_value = fast_divide(1.0f, mul_1);                                             // line 7: scaled = (x.float() * (1.0 / scale.float())).clamp(-largest, largest)
}

__device__ __forceinline__ float add_rms_norm_quant_2(float x, float residual, float weight, float rstd, float row_value) {
    return minimum(maximum((x + residual) * rstd * weight * row_value, -448.0f), 448.0f);  // line 7: scaled = (x.float() * (1.0 / scale.float())).clamp(-largest, largest)
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

extern "C" __global__ void __launch_bounds__(128, 8)
fg_add_rms_norm_quant(const bf16* x_ptr, const bf16* residual_ptr, const bf16* weight_ptr, bf16* out_2_ptr, f8e4m3* out_0_ptr, float* out_1_ptr, i64 x_dim0, double eps) {
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 3: reduces each row to squares; writes out_2.
    bf16 x_raw[CHUNKS][LANES];
    bf16 residual_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(x_raw[c], x_ptr, row * 4096 + column);
        load_lanes<8>(residual_raw[c], residual_ptr, row * 4096 + column);
    }
    float squares_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) squares_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float squares_part[LANES];
        float result_2[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            add_rms_norm_quant_0(x[v], residual[v], squares_part[v], result_2[v]);
            squares_of[v % SUMS] = sum_f32_combine(squares_of[v % SUMS], squares_part[v]);
        }
        bf16 result_2_raw[LANES];
        narrow_vec(result_2, result_2_raw);
        store_lanes<8>(out_2_ptr, row * 4096 + column, result_2_raw);
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] = sum_f32_combine(squares_of[k], squares_of[k + half]);
    }
    float squares = squares_of[0];
    row_sum_f32_leave(squares, shared_array<float>(0));
    block_sync();
    squares = row_sum_f32_meet(shared_array<float>(0));

    // Phase 2 of 3: computes rstd; reduces each row to largest.
    const float rstd = add_rms_norm_quant_row_1(squares, eps);
    bf16 weight_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(weight_raw[c], weight_ptr, column);
    }
    float largest_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float weight[LANES];
        widen_vec(weight_raw[c], weight);
        float largest_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            largest_part[v] = add_rms_norm_quant_1(x[v], residual[v], rstd, weight[v]);
            largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], largest_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
    }
    float largest = largest_of[0];
    row_amax_f32_leave(largest, shared_array<float>(64));
    block_sync();
    largest = row_amax_f32_meet(shared_array<float>(64));

    // Phase 3 of 3: computes found, row_value; writes out_0, out_1.
    float found;
    float row_value;
    add_rms_norm_quant_row_2(largest, found, row_value);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float weight[LANES];
        widen_vec(weight_raw[c], weight);
        float result_0[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result_0[v] = add_rms_norm_quant_2(x[v], residual[v], weight[v], rstd, row_value);
        }
        f8e4m3 result_0_raw[LANES];
        narrow_vec(result_0, result_0_raw);
        store_lanes<8>(out_0_ptr, row * 4096 + column, result_0_raw);
    }
    if (thread == 0) {
        float narrowed;
        narrow(found, narrowed);
        store(out_1_ptr, row, narrowed);
    }
}
