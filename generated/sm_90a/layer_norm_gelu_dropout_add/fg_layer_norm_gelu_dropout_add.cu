// layer_norm_gelu_dropout_add: row reduction, 3 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid x_dim0, block 256, 256 bytes of shared memory: a row fits the registers of 256 threads, 32 elements each.
// Reads x_dim0 * 32768 + 32768 bytes, writes x_dim0 * 16384.
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

// e^x within about 2 + |1.2 x| units in the last place; subnormal results become zero.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// 1 / x within one unit in the last place, of x from 1 on; subnormal results become zero.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
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
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One element from global memory. Never the read-only path: outputs may alias inputs.
__device__ __forceinline__ i16 load(const i16* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<i16>(bits);
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

// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
__device__ __forceinline__ i16 load_once(const i16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<i16>(bits);
}
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

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ i64 widen(i16 x) { return x; }
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

// Two neighbouring elements of a buffer that the kernel does not write, aligned to the size of both, in their computing type.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide(Wide (&dst)[2], const T* base, i64 i) {
  T pair[2];
  const T* from = base + i;
  static_assert(sizeof(T) == 2 || sizeof(T) == 8, "no other elements were expected");
  if constexpr (sizeof(T) == 8) {
    u64 bits[2];
    asm("ld.global.v2.b64 {%0, %1}, [%2];" : "=l"(bits[0]), "=l"(bits[1]) : "l"(from));
    memcpy(pair, bits, sizeof(pair));
  }
  if constexpr (sizeof(T) == 2) {
    u32 bits;
    asm("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    memcpy(pair, &bits, sizeof(pair));
  }
  widen_vec(pair, dst);
}

// Random bits, 16 an element, which load() and its kind give as if they lay in memory: Philox-4x32-10 of Salmon et al. (2011).
struct RandomBits { u32 low, high, stream; };

__device__ __forceinline__ RandomBits random_bits(const i64* key, u32 stream) {
  const u64 bits = static_cast<u64>(load_once(key, 0));
  return {static_cast<u32>(bits), static_cast<u32>(bits >> 32), stream};
}

// The bits of the eight elements from 8 * call on.
__device__ __forceinline__ void philox(u32* words, RandomBits key, u64 call) {
  u32 c0 = static_cast<u32>(call), c1 = static_cast<u32>(call >> 32), c2 = key.stream, c3 = 0;
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    const u32 left = c0, right = c2;
    c0 = __umulhi(right, 0xCD9E8D57u) ^ c1 ^ (key.low + round * 0x9E3779B9u);
    c2 = __umulhi(left, 0xD2511F53u) ^ c3 ^ (key.high + round * 0xBB67AE85u);
    c1 = right * 0xCD9E8D57u;
    c3 = left * 0xD2511F53u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Up to eight neighbours, of which every W-th is at a multiple of W.
template <int W, int N>
__device__ __forceinline__ void load_lanes(i16 (&dst)[N], RandomBits key, i64 i) {
  static_assert(N <= 8 && 8 % W == 0, "");
  const i32 place = static_cast<i32>(i) & 7;
  u32 words[8] = {};
  philox(words, key, static_cast<u64>(i) >> 3);
  if constexpr (W < N) {
    if (place + N > 8) philox(words + 4, key, (static_cast<u64>(i) >> 3) + 1);
  }
  if constexpr (W < 8) {  // the first one's bits move to the front
#pragma unroll
    for (i32 w = 0; w + 2 < 8; ++w) words[w] = place & 4 ? words[w + 2] : words[w];
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 2 ? words[w + 1] : words[w];
  }
  if constexpr (W < 2) {
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 1 ? words[w] >> 16 | words[w + 1] << 16 : words[w];
  }
  memcpy(dst, words, sizeof(dst));
}

__device__ __forceinline__ i16 load(RandomBits key, i64 i) {
  i16 one[1];
  load_lanes<1>(one, key, i);
  return one[0];
}

__device__ __forceinline__ i16 load_once(RandomBits key, i64 i) { return load(key, i); }

// Two neighbours, of which the first is at a multiple of two.
__device__ __forceinline__ void load_wide(i64 (&dst)[2], RandomBits key, i64 i) {
  i16 pair[2];
  load_lanes<2>(pair, key, i);
  dst[0] = pair[0];
  dst[1] = pair[1];
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ i32 layer_norm_gelu_dropout_add_row_0(i64 scalar_1) {
    return static_cast<i32>(static_cast<i64>(static_cast<i16>(scalar_1)));
}

__device__ __forceinline__ float layer_norm_gelu_dropout_add_row_1(float total) {
    return total * 0.0001220703125f;                                                  // line 23: activated = gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps),…
}

__device__ __forceinline__ float layer_norm_gelu_dropout_add_1(float x, float mean) {
    return (x - mean) * (x - mean);                                                   // line 23: activated = gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps),…
}

__device__ __forceinline__ float layer_norm_gelu_dropout_add_row_2(float squares, float eps) {
    return fast_rsqrt(squares * 0.0001220703125f + eps);                              // line 23: activated = gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps),…
}

__device__ __forceinline__ float layer_norm_gelu_dropout_add_2(float x, float mean, float rstd, i32 row_value, float scalar_2, float weight, float bias, i64 random, float residual) {
    const float add_1 = (x - mean) * rstd * weight + bias;                            // line 23: activated = gelu_of(F.layer_norm(x, (x.shape[-1],), weight, bias, eps),…
    const float sigmoid_1 = fast_reciprocal(1.0f + fast_exp(-(add_1 * (1.5957691216057308f + 0.07135481627260025f * (add_1 * add_1)))));  // line 7: return F.gelu(x, approximate=approximate)
    const float mul_1 = add_1 * sigmoid_1 * (static_cast<i32>(random) >= row_value ? scalar_2 : 0.0f);  // line 24: return fg.dropout(activated, p, training, seed=seed) + residual
    return mul_1 + residual;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 256;  // that share a row
constexpr i32 MEETING = 8;  // lanes that take a warp's part each: a power of two
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

extern "C" __global__ void __launch_bounds__(256, 4)
fg_layer_norm_gelu_dropout_add(const bf16* x_ptr, const bf16* weight_ptr, const bf16* bias_ptr, const i64* random_ptr, const bf16* residual_ptr, bf16* out_ptr, i64 x_dim0, double eps, i64 scalar_1, double scalar_2) {
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 3: computes row_value; reduces each row to total.
    const i32 row_value = layer_norm_gelu_dropout_add_row_0(scalar_1);
    bf16 x_raw[CHUNKS][LANES];
    bf16 residual_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(x_raw[c], x_ptr, row * 8192 + column);
        load_lanes<8>(residual_raw[c], residual_ptr, row * 8192 + column);
    }
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], x[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
    }
    float total = total_of[0];
    row_sum_f32_leave(total, shared_array<float>(0));
    block_sync();
    total = row_sum_f32_meet(shared_array<float>(0));

    // Phase 2 of 3: computes mean; reduces each row to squares.
    const float mean = layer_norm_gelu_dropout_add_row_1(total);
    float squares_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) squares_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
        float squares_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            squares_part[v] = layer_norm_gelu_dropout_add_1(x[v], mean);
            squares_of[v % SUMS] = sum_f32_combine(squares_of[v % SUMS], squares_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] = sum_f32_combine(squares_of[k], squares_of[k + half]);
    }
    float squares = squares_of[0];
    row_sum_f32_leave(squares, shared_array<float>(128));
    block_sync();
    squares = row_sum_f32_meet(shared_array<float>(128));

    // Phase 3 of 3: computes rstd; writes out.
    const float rstd = layer_norm_gelu_dropout_add_row_2(squares, eps);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        bf16 weight_raw[LANES];
        load_lanes<8>(weight_raw, weight_ptr, column);
        bf16 bias_raw[LANES];
        load_lanes<8>(bias_raw, bias_ptr, column);
        i16 random_raw[LANES];
        load_lanes<8>(random_raw, random_bits(random_ptr, 0), row * 8192 + column);
        float weight[LANES];
        widen_vec(weight_raw, weight);
        float bias[LANES];
        widen_vec(bias_raw, bias);
        i64 random[LANES];
        widen_vec(random_raw, random);
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float result_0[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result_0[v] = layer_norm_gelu_dropout_add_2(x[v], mean, rstd, row_value, scalar_2, weight[v], bias[v], random[v], residual[v]);
        }
        bf16 result_0_raw[LANES];
        narrow_vec(result_0, result_0_raw);
        store_lanes<8>(out_ptr, row * 8192 + column, result_0_raw);
    }
}
