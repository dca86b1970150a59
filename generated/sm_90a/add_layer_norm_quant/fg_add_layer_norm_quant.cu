// add_layer_norm_quant: row reduction, 4 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid x_dim0, block 128, 48 bytes of shared memory: a row fits the registers of 128 threads, 32 elements per thread.
// Reads x_dim0 * 16384 + 16384 bytes, writes x_dim0 * 12292.
// x, residual, h: bf16 [x_dim0, 4096]; weight, bias: bf16 [4096]; values: f8e4m3 [x_dim0, 4096]; scale: float [x_dim0,
// 1]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.f8e4m3.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/minimum.float.cuh"
#include "../primitives/narrow.f8e4m3.bf16.float.cuh"
#include "../primitives/narrow_vec.f8e4m3.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.8.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/store.float.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// add_layer_norm_quant in fusegen/specs/quantization.py; its def is line 1:
//   19: h = x + residual
//   20: normalized = F.layer_norm(h, (h.shape[-1],), weight, bias, eps)
// quantized in fusegen/specs/quantization.py; its def is line 1:
//   33: scale = wide.abs().amax(dims, keepdim=granularity != "per_tensor").clamp(min=EPS) * (1.0 / largest)
// narrowed in fusegen/specs/quantization.py; its def is line 1:
//    8: inverse_scale = 1.0 / scale.float()
//    9: values = (x.float() * inverse_scale).clamp(-largest, largest)

__device__ __forceinline__ float amax_f32_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float result_of(float x, float residual) {
    return x + residual;                                                              // add_layer_norm_quant, line 19
}

__device__ __forceinline__ float mean_of(float total) {
    return total * (1.0f / 4096.0f);                                                  // add_layer_norm_quant, line 20
}

__device__ __forceinline__ float squared_deviation(float x, float residual, float mean) {
    const float difference = x + residual - mean;                                     // add_layer_norm_quant, line 20
    return difference * difference;
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // add_layer_norm_quant, line 20
}

__device__ __forceinline__ void magnitude_and_normalized_of(float x, float residual, float mean, float rstd,
        float weight, float bias, float& amax_part, float& normalized) {
    normalized = (x + residual - mean) * rstd * weight + bias;                        // add_layer_norm_quant, line 20
    amax_part = fabsf(normalized);                                                    // quantized, line 33
}

__device__ __forceinline__ void scale_and_inverse_scale_of(float amax, float& scale, float& inverse_scale) {
    scale = maximum(amax, 1e-10f) * (1.0f / 448.0f);                                  // quantized, line 33
    inverse_scale = fast_divide(1.0f, scale);                                         // narrowed, line 8
}

__device__ __forceinline__ float result_2_of(float normalized, float inverse_scale) {
    return minimum(maximum(normalized * inverse_scale, -448.0f), 448.0f);             // narrowed, line 9
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
constexpr i32 AMAX_OFFSET = 32;

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

// Stores a warp's partial result; after a barrier, row_amax_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_amax_f32_store_partial(float value, SharedArray<float> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ float row_amax_f32_combine_partials(SharedArray<float> scratch) {
    const i32 warp = lane_id() % WARPS;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = WARPS / 2; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_add_layer_norm_quant(const bf16* x_ptr, const bf16* residual_ptr, const bf16* weight_ptr, const bf16* bias_ptr,
        f8e4m3* values_ptr, float* scale_ptr, bf16* h_ptr, double eps) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 4: reduces the row to total; writes h.
    bf16 x_raw[CHUNKS][LANES];
    bf16 residual_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(x_raw[c], x_ptr, row * COLUMNS + column);
        load_lanes<LANES>(residual_raw[c], residual_ptr, row * COLUMNS + column);
    }
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float result_2[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result_2[v] = result_of(x[v], residual[v]);
            total_of[v % PARTIALS] += result_2[v];
        }
        bf16 result_2_raw[LANES];
        narrow_vec(result_2, result_2_raw);
        store_lanes<LANES>(h_ptr, row * COLUMNS + column, result_2_raw);
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] += total_of[k + half];
    }
    row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET));
    block_sync();
    const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET));

    // Phase 2 of 4: computes mean; reduces the row to squares.
    const float mean = mean_of(total);
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float squares_part = squared_deviation(x[v], residual[v], mean);
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

    // Phase 3 of 4: computes rstd; reduces the row to amax; stores normalized for later phases.
    const float rstd = rstd_of(squares, static_cast<float>(eps));
    float normalized_kept[CHUNKS][LANES];
    float amax_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) amax_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        bf16 weight_raw[LANES];
        load_lanes<LANES>(weight_raw, weight_ptr, column);
        bf16 bias_raw[LANES];
        load_lanes<LANES>(bias_raw, bias_ptr, column);
        float weight[LANES];
        widen_vec(weight_raw, weight);
        float bias[LANES];
        widen_vec(bias_raw, bias);
        float x[LANES];
        widen_vec(x_raw[c], x);
        float residual[LANES];
        widen_vec(residual_raw[c], residual);
        float normalized[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            float amax_part;
            magnitude_and_normalized_of(x[v], residual[v], mean, rstd, weight[v], bias[v], amax_part, normalized[v]);
            amax_of[v % PARTIALS] = amax_f32_combine(amax_of[v % PARTIALS], amax_part);
            normalized_kept[c][v] = normalized[v];
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) amax_of[k] = amax_f32_combine(amax_of[k], amax_of[k + half]);
    }
    row_amax_f32_store_partial(amax_of[0], shared_array<float>(AMAX_OFFSET));
    block_sync();
    const float amax = row_amax_f32_combine_partials(shared_array<float>(AMAX_OFFSET));

    // Phase 4 of 4: computes scale, inverse_scale; writes values, scale.
    float scale;
    float inverse_scale;
    scale_and_inverse_scale_of(amax, scale, inverse_scale);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        const float (&normalized)[LANES] = normalized_kept[c];
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = result_2_of(normalized[v], inverse_scale);
        }
        f8e4m3 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(values_ptr, row * COLUMNS + column, result_raw);
    }
    if (thread == 0) {
        store_narrowed(scale_ptr, row, scale);
    }
}
