// layer_norm_backward: row and column reduction, 4 phases, rows read once into shared memory, emitted by fusegen for
// sm_90a.
// Grid min(x_dim0, 264), block 128, 65664 bytes of shared memory: prefetches the next rows into shared memory;
// registers hold the column sums.
// Reads x_dim0 * 16384 + 8192 bytes, writes x_dim0 * 8192 + min(x_dim0, 264) * 32768.
// x, dy, dx: bf16 [x_dim0, 4096]; weight: bf16 [4096]; partial_column_total, partial_column_total_2: float [min(x_dim0,
// 264), 4096]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/copy_async.cuh"
#include "../primitives/copy_async_commit.cuh"
#include "../primitives/copy_async_wait.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.float.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_load_vec.cuh"
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
// layer_norm_backward in fusegen/specs/normalization.py; its def is line 1:
//    8: centered = x - x.mean(-1, keepdim=True)
//    9: rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
//   10: normalized = centered * rstd
//   11: dx = _input_gradient(normalized, rstd, dy * weight)
//   12: dweight, dbias = (dy * normalized).sum(0), dy.sum(0)
// _input_gradient in fusegen/specs/normalization.py; its def is line 1:
//    3: return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True))

__device__ __forceinline__ float product_of(float dy, float weight) {
    return dy * weight;                                                               // layer_norm_backward, line 11
}

__device__ __forceinline__ void mean_and_mean_2_of(float total, float total_2, float& mean, float& mean_2) {
    mean = total * (1.0f / 4096.0f);                                                  // layer_norm_backward, line 8
    mean_2 = total_2 * (1.0f / 4096.0f);                                              // _input_gradient, line 3
}

__device__ __forceinline__ float squared_deviation(float x, float mean) {
    const float centered = x - mean;                                                  // layer_norm_backward, line 8
    return centered * centered;                                                       // layer_norm_backward, line 9
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // layer_norm_backward, line 9
}

__device__ __forceinline__ void elements_of_phase_3(float x, float dy, float mean, float rstd, float weight,
        float& total_3_part, float& column_total_part) {
    const float normalized = (x - mean) * rstd;                                       // layer_norm_backward, line 10
    total_3_part = dy * weight * normalized;                                          // _input_gradient, line 3
    column_total_part = dy * normalized;                                              // layer_norm_backward, line 12
}

__device__ __forceinline__ float mean_3_of(float total_3) {
    return total_3 * (1.0f / 4096.0f);                                                // _input_gradient, line 3
}

__device__ __forceinline__ float normalized(float x, float dy, float mean, float rstd, float mean_2, float mean_3,
        float weight) {
    return rstd * (dy * weight - mean_2 - (x - mean) * rstd * mean_3);                // _input_gradient, line 3
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
constexpr i32 SLOTS = 16;  // pipeline stages: vectors per thread in shared memory
constexpr i32 AHEAD = SLOTS - CHUNKS;  // of them for later rows
constexpr i32 SLOT = THREADS * LANES;  // elements between stages
constexpr i32 BLOCKS_PER_SM = 2;  // at least, which limits the registers of a thread
constexpr i32 TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 TOTAL_2_OFFSET = 16;
constexpr i32 SQUARES_OFFSET = 32;
constexpr i32 TOTAL_3_OFFSET = 48;
constexpr i32 X_OFFSET = 128;
constexpr i32 DY_OFFSET = X_OFFSET + SLOTS * SLOT * sizeof(bf16);

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
fg_layer_norm_backward(const bf16* x_ptr, const bf16* dy_ptr, const bf16* weight_ptr, bf16* dx_ptr,
        float* partial_column_total_ptr, float* partial_column_total_2_ptr, i64 x_dim0_extent, double eps) {
    const Index row_count = static_cast<Index>(x_dim0_extent);
    const i32 thread = thread_id();
    // This block's share of the rows; its column sums become row `part` of the workspace.
    constexpr i32 PARTS = 264;  // at most: every block has rows
    const Index part = block_id();
    float column_total_2[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) column_total_2[c][v] = 0.0f;
    }
    float column_total[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) column_total[c][v] = 0.0f;
    }
    auto x_staged = shared_array<bf16>(X_OFFSET);
    auto dy_staged = shared_array<bf16>(DY_OFFSET);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // consecutive; opaque: not kept in a register
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count) {
            copy_async<LANES>(x_staged, slot * SLOT + thread * LANES, x_ptr, row * COLUMNS + column);
            copy_async<LANES>(dy_staged, slot * SLOT + thread * LANES, dy_ptr, row * COLUMNS + column);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    // Operands that all rows share, in their storage type.
    bf16 weight_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(weight_raw[c], weight_ptr, column);
    }
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 4: reduces the row to total, total_2; accumulates column_total_2 of each column.
        float total_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
        float total_2_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) total_2_of[k] = 0.0f;
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            float x[LANES];
            bf16 x_raw[LANES];
            shared_load_vec(x_raw, x_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(x_raw, x);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                const float total_2_part = product_of(dy[v], weight[v]);
                total_of[v % PARTIALS] += x[v];
                total_2_of[v % PARTIALS] += total_2_part;
                column_total_2[c][v] += dy[v];
            }
        }
#pragma unroll
        for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_of[k] += total_of[k + half];
        }
#pragma unroll
        for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_2_of[k] += total_2_of[k + half];
        }
        row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET));
        row_sum_f32_store_partial(total_2_of[0], shared_array<float>(TOTAL_2_OFFSET));
        block_sync();
        const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET));
        const float total_2 = row_sum_f32_combine_partials(shared_array<float>(TOTAL_2_OFFSET));

        // Phase 2 of 4: computes mean, mean_2; reduces the row to squares.
        float mean;
        float mean_2;
        mean_and_mean_2_of(total, total_2, mean, mean_2);
        float squares_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            float x[LANES];
            bf16 x_raw[LANES];
            shared_load_vec(x_raw, x_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(x_raw, x);
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

        // Phase 3 of 4: computes rstd; reduces the row to total_3; accumulates column_total of each column.
        const float rstd = rstd_of(squares, static_cast<float>(eps));
        float total_3_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) total_3_of[k] = 0.0f;
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float x[LANES];
            bf16 x_raw[LANES];
            shared_load_vec(x_raw, x_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(x_raw, x);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                float total_3_part;
                float column_total_part;
                elements_of_phase_3(x[v], dy[v], mean, rstd, weight[v], total_3_part, column_total_part);
                total_3_of[v % PARTIALS] += total_3_part;
                column_total[c][v] += column_total_part;
            }
        }
#pragma unroll
        for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_3_of[k] += total_3_of[k + half];
        }
        row_sum_f32_store_partial(total_3_of[0], shared_array<float>(TOTAL_3_OFFSET));
        block_sync();
        const float total_3 = row_sum_f32_combine_partials(shared_array<float>(TOTAL_3_OFFSET));

        // Phase 4 of 4: computes mean_3; writes dx.
        const float mean_3 = mean_3_of(total_3);
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float x[LANES];
            bf16 x_raw[LANES];
            shared_load_vec(x_raw, x_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(x_raw, x);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
            float result[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                result[v] = normalized(x[v], dy[v], mean, rstd, mean_2, mean_3, weight[v]);
            }
            bf16 result_raw[LANES];
            narrow_vec(result, result_raw);
            store_lanes<LANES>(dx_ptr, row * COLUMNS + column, result_raw);
        }
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
    launch_dependents();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        store_lanes<4>(partial_column_total_ptr, part * 4096 + column, column_total[c]);
        store_lanes<4>(partial_column_total_2_ptr, part * 4096 + column, column_total_2[c]);
    }
}
