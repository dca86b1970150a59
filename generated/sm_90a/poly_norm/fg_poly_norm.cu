// poly_norm: row reduction, 2 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid x_dim0, block 128, 48 bytes of shared memory: a row fits the registers of 128 threads, 32 elements per thread.
// Reads x_dim0 * 8192 + 8 bytes, writes x_dim0 * 8192.
// x, out: bf16 [x_dim0, 4096]; weight: bf16 [3]; bias: bf16 [1]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.bf16.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// poly_norm in fusegen/specs/normalization.py; its def is line 1:
//    8: powers = (wide * wide * wide, wide * wide, wide)
//   10: return (parts[0] + parts[1] + parts[2] + widened(bias)).to(x.dtype)
// reciprocal_rms in fusegen/specs/normalization.py; its def is line 1:
//    3: return torch.rsqrt(x.square().mean(-1, keepdim=True) + (1e-6 if eps is None else eps))

__device__ __forceinline__ void elements_of_phase_1(float x, float& squares_part, float& squares_2_part,
        float& squares_3_part) {
    const float product = x * x;                                                      // poly_norm, line 8
    const float product_2 = product * x;
    squares_part = product_2 * product_2;                                             // reciprocal_rms, line 3
    squares_2_part = product * product;
    squares_3_part = product;                                                         // poly_norm, line 8
}

__device__ __forceinline__ void values_of_row_of(float squares, float eps, float squares_2, float squares_3,
        float& rstd, float& rstd_2, float& rstd_3) {
    rstd = fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // reciprocal_rms, line 3
    rstd_2 = fast_rsqrt(squares_2 * (1.0f / 4096.0f) + eps);
    rstd_3 = fast_rsqrt(squares_3 * (1.0f / 4096.0f) + eps);
}

__device__ __forceinline__ float result_of(float x, float weight_0, float rstd, float weight_1, float rstd_2,
        float weight_2, float rstd_3, float bias) {
    const float product = x * x;                                                      // poly_norm, line 8
    const float sum = weight_0 * (product * x) * rstd + weight_1 * product * rstd_2;  // poly_norm, line 10
    return sum + weight_2 * x * rstd_3 + bias;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 4096;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;  // per row
constexpr i32 WARPS = 4;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 4;  // vectors per thread: CHUNKS * THREADS * LANES = COLUMNS
constexpr i32 BLOCKS_PER_SM = 8;  // at least, which limits the registers of a thread
constexpr i32 SQUARES_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 SQUARES_2_OFFSET = 16;
constexpr i32 SQUARES_3_OFFSET = 32;

// Stores a warp's partial result; after a barrier, row_sum_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_sum_f32_store_partial(float value, SharedArray<float> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ float row_sum_f32_combine_partials(SharedArray<float> scratch) {
    const i32 warp = lane_id() % WARPS;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = WARPS / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_poly_norm(const bf16* x_ptr, const bf16* weight_ptr, const bf16* bias_ptr, bf16* out_ptr, double eps) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to squares, squares_2, squares_3.
    const float weight_0 = widen(load(weight_ptr, 0));
    const float weight_1 = widen(load(weight_ptr, 1));
    const float weight_2 = widen(load(weight_ptr, 2));
    const float bias = widen(load(bias_ptr, 0));
    bf16 x_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(x_raw[c], x_ptr, row * COLUMNS + column);
    }
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
    float squares_2_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_2_of[k] = 0.0f;
    float squares_3_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_3_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            float squares_part;
            float squares_2_part;
            float squares_3_part;
            elements_of_phase_1(x[v], squares_part, squares_2_part, squares_3_part);
            squares_of[v % PARTIALS] += squares_part;
            squares_2_of[v % PARTIALS] += squares_2_part;
            squares_3_of[v % PARTIALS] += squares_3_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] += squares_of[k + half];
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_2_of[k] += squares_2_of[k + half];
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_3_of[k] += squares_3_of[k + half];
    }
    row_sum_f32_store_partial(squares_of[0], shared_array<float>(SQUARES_OFFSET));
    row_sum_f32_store_partial(squares_2_of[0], shared_array<float>(SQUARES_2_OFFSET));
    row_sum_f32_store_partial(squares_3_of[0], shared_array<float>(SQUARES_3_OFFSET));
    block_sync();
    const float squares = row_sum_f32_combine_partials(shared_array<float>(SQUARES_OFFSET));
    const float squares_2 = row_sum_f32_combine_partials(shared_array<float>(SQUARES_2_OFFSET));
    const float squares_3 = row_sum_f32_combine_partials(shared_array<float>(SQUARES_3_OFFSET));

    // Phase 2 of 2: computes rstd, rstd_2, rstd_3; writes out.
    float rstd;
    float rstd_2;
    float rstd_3;
    values_of_row_of(squares, static_cast<float>(eps), squares_2, squares_3, rstd, rstd_2, rstd_3);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float x[LANES];
        widen_vec(x_raw[c], x);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = result_of(x[v], weight_0, rstd, weight_1, rstd_2, weight_2, rstd_3, bias);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(out_ptr, row * COLUMNS + column, result_raw);
    }
}
