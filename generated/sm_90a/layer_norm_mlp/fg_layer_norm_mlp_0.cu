// layer_norm_mlp_0: row reduction, 3 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid x_dim0, block 128, 32 bytes of shared memory: a row fits the registers of 128 threads, 32 elements per thread.
// Reads x_dim0 * 8192 + 16384 bytes, writes x_dim0 * 8192.
// x, normalized: bf16 [x_dim0, 4096]; norm_weight, norm_bias: bf16 [4096]; all contiguous, 16-byte aligned.
// A launch of its own reads normalized: matmul with epilogue.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/launch_dependents.cuh"
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
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// layer_norm_mlp in fusegen/specs/linear.py; its def is line 1:
//   28: normalized = rms_normalized(x, gamma, eps) if is_rms else F.layer_norm(x, (x.shape[-1],), gamma, norm_bias,
//       eps)

__device__ __forceinline__ float mean_of(float total) {
    return total * (1.0f / 4096.0f);                                                  // line 28
}

__device__ __forceinline__ float squared_deviation(float x, float mean) {
    const float difference = x - mean;                                                // line 28
    return difference * difference;
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // line 28
}

__device__ __forceinline__ float normalized(float x, float mean, float rstd, float norm_weight, float norm_bias) {
    return (x - mean) * rstd * norm_weight + norm_bias;                               // line 28
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
constexpr i32 TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 SQUARES_OFFSET = 16;

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
fg_layer_norm_mlp_0(const bf16* x_ptr, const bf16* norm_weight_ptr, const bf16* norm_bias_ptr, bf16* normalized_ptr,
        double eps) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 3: reduces the row to total.
    bf16 x_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(x_raw[c], x_ptr, row * COLUMNS + column);
    }
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_of[v % PARTIALS] += x[v];
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] += total_of[k + half];
    }
    row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET));
    block_sync();
    const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET));

    // Phase 2 of 3: computes mean; reduces the row to squares.
    const float mean = mean_of(total);
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float squares_part = squared_deviation(x[v], mean);
            squares_of[v % PARTIALS] += squares_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] += squares_of[k + half];
    }
    row_sum_f32_store_partial(squares_of[0], shared_array<float>(SQUARES_OFFSET));
    block_sync();
    const float squares = row_sum_f32_combine_partials(shared_array<float>(SQUARES_OFFSET));

    // Phase 3 of 3: computes rstd; writes normalized.
    const float rstd = rstd_of(squares, static_cast<float>(eps));
    launch_dependents();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        bf16 norm_weight_raw[LANES];
        load_lanes<LANES>(norm_weight_raw, norm_weight_ptr, column);
        bf16 norm_bias_raw[LANES];
        load_lanes<LANES>(norm_bias_raw, norm_bias_ptr, column);
        float norm_weight[LANES];
        widen_vec(norm_weight_raw, norm_weight);
        float norm_bias[LANES];
        widen_vec(norm_bias_raw, norm_bias);
        float x[LANES];
        widen_vec(x_raw[c], x);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = normalized(x[v], mean, rstd, norm_weight[v], norm_bias[v]);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(normalized_ptr, row * COLUMNS + column, result_raw);
    }
}
