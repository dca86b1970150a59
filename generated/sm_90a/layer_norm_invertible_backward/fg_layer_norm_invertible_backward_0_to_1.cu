// layer_norm_invertible_backward_0_to_1: 2 kernels in one launch, emitted by fusegen for sm_90a.
// Grid min(y_dim0, 264) + 1, block 128, 65664 bytes of shared memory. The blocks of each part follow those of the
// previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// layer_norm_invertible_backward_0: row reduction, 2 phases, rows read once into registers.
// Blocks: 1; a row fits the registers of 128 threads, 32 elements per thread.
// Reads 8192 bytes, writes 1.
// weight: bf16 [4096]; has_zero: bool []; all contiguous, 16-byte aligned.
// layer_norm_invertible_backward_1: row and column reduction, 2 phases, rows read once into shared memory.
// Blocks: min(y_dim0, 264); prefetches the next rows into shared memory; registers hold the column sums.
// Reads y_dim0 * 16388 + 16384 bytes, writes y_dim0 * 8192 + min(y_dim0, 264) * 32768.
// dy, y, dx: bf16 [y_dim0, 4096]; weight, bias: bf16 [4096]; rstd: float [y_dim0, 1]; partial_column_total,
// partial_column_total_2: float [min(y_dim0, 264), 4096]; all contiguous, 16-byte aligned.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/copy_async.cuh"
#include "../primitives/copy_async_commit.cuh"
#include "../primitives/copy_async_wait.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.float.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bool.bf16.float.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_load_vec.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/store.bool.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.float.cuh"
#include "../primitives/widen_vec.bf16.cuh"

namespace layer_norm_invertible_backward_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// layer_norm_invertible_backward in fusegen/specs/normalization.py; its def is line 1:
//   19: has_zero = (weight == 0).any()

__device__ __forceinline__ i32 any_i32_identity() {
    return 0;
}

__device__ __forceinline__ i32 any_i32_combine(i32 a, i32 b) {
    return a | b;
}

__device__ __forceinline__ i32 is_equal_of(float weight) {
    return static_cast<i32>(weight == 0.0f);                                          // line 19
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;  // per row
constexpr i32 WARPS = 4;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 4;  // vectors per thread: CHUNKS * THREADS * LANES = 4096
constexpr i32 ANY_OFFSET = 0;  // in shared memory, in bytes

// Stores a warp's partial result; after a barrier, row_any_i32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_any_i32_store_partial(i32 value, SharedArray<i32> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = any_i32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ i32 row_any_i32_combine_partials(SharedArray<i32> scratch) {
    const i32 warp = lane_id() % WARPS;
    i32 value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = WARPS / 2; mask > 0; mask /= 2) value = any_i32_combine(value, shuffle_xor(value, mask));
    return value;
}

__device__ __forceinline__ void run(i32 /*block*/, const bf16* weight_ptr, bool* has_zero_ptr) {
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to any.
    i32 any_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) any_of[k] = any_i32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        bf16 weight_raw[LANES];
        load_lanes<LANES>(weight_raw, weight_ptr, column);
        float weight[LANES];
        widen_vec(weight_raw, weight);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const i32 any_part = is_equal_of(weight[v]);
            any_of[v % PARTIALS] = any_i32_combine(any_of[v % PARTIALS], any_part);
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) any_of[k] = any_i32_combine(any_of[k], any_of[k + half]);
    }
    row_any_i32_store_partial(any_of[0], shared_array<i32>(ANY_OFFSET));
    block_sync();
    const i32 any = row_any_i32_combine_partials(shared_array<i32>(ANY_OFFSET));

    // Phase 2 of 2: writes has_zero.
    launch_dependents();
    if (thread == 0) {
        store_narrowed(has_zero_ptr, 0, any);
    }
}
}  // namespace layer_norm_invertible_backward_0

namespace layer_norm_invertible_backward_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// layer_norm_invertible_backward in fusegen/specs/normalization.py; its def is line 1:
//   16: normalized = (y - bias) / weight
//   17: dx = _input_gradient(normalized, rstd, dy * weight)
//   18: dweight, dbias = (dy * normalized).sum(0), dy.sum(0)
// _input_gradient in fusegen/specs/normalization.py; its def is line 1:
//    3: return rstd * (grad - grad.mean(-1, keepdim=True) - normalized * (grad * normalized).mean(-1, keepdim=True))

__device__ __forceinline__ void elements_of_phase_1(float dy, float weight, float y, float bias, float& total_part,
        float& total_2_part, float& column_total_part) {
    // layer_norm_invertible_backward, line 17
    const float product = dy * weight;
    // layer_norm_invertible_backward, line 16
    const float normalized = fast_divide(y - bias, weight);
    // layer_norm_invertible_backward, line 17
    total_part = product;
    total_2_part = product * normalized;                                              // _input_gradient, line 3
    // layer_norm_invertible_backward, line 18
    column_total_part = dy * normalized;
}

__device__ __forceinline__ void mean_and_mean_2_of(float total, float total_2, float& mean, float& mean_2) {
    mean = total * (1.0f / 4096.0f);                                                  // _input_gradient, line 3
    mean_2 = total_2 * (1.0f / 4096.0f);
}

__device__ __forceinline__ float result_of(float dy, float y, float rstd, float mean, float mean_2, float weight,
        float bias) {
    return rstd * (dy * weight - mean - fast_divide(y - bias, weight) * mean_2);      // _input_gradient, line 3
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
constexpr i32 TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 TOTAL_2_OFFSET = 32;
constexpr i32 DY_OFFSET = 128;
constexpr i32 Y_OFFSET = DY_OFFSET + SLOTS * SLOT * sizeof(bf16);

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

__device__ __forceinline__ void run(i32 block, const bf16* dy_ptr, const bf16* weight_ptr, const bf16* y_ptr,
        const bf16* bias_ptr, const float* rstd_ptr, bf16* dx_ptr, float* partial_column_total_ptr,
        float* partial_column_total_2_ptr, i64 y_dim0_extent) {
    const Index row_count = static_cast<Index>(y_dim0_extent);
    const i32 thread = thread_id();
    // This block's share of the rows; its column sums become row `part` of the workspace.
    constexpr i32 PARTS = 264;  // at most: every block has rows
    const Index part = block;
    float column_total[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) column_total[c][v] = 0.0f;
    }
    float column_total_2[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) column_total_2[c][v] = 0.0f;
    }
    i32 turn = 0;  // rows alternate between two scratch buffers, so that one barrier per phase suffices
    auto dy_staged = shared_array<bf16>(DY_OFFSET);
    auto y_staged = shared_array<bf16>(Y_OFFSET);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // consecutive; opaque: not kept in a register
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count) {
            copy_async<LANES>(dy_staged, slot * SLOT + thread * LANES, dy_ptr, row * COLUMNS + column);
            copy_async<LANES>(y_staged, slot * SLOT + thread * LANES, y_ptr, row * COLUMNS + column);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    // Operands that all rows share, in their storage type.
    bf16 weight_raw[CHUNKS][LANES];
    bf16 bias_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(weight_raw[c], weight_ptr, column);
        load_lanes<LANES>(bias_raw[c], bias_ptr, column);
    }
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 2: reduces the row to total, total_2; accumulates column_total, column_total_2 of each column.
        const float rstd = load(rstd_ptr, row);
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
            float bias[LANES];
            widen_vec(bias_raw[c], bias);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            float y[LANES];
            bf16 y_raw[LANES];
            shared_load_vec(y_raw, y_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(y_raw, y);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                float total_part;
                float total_2_part;
                float column_total_part;
                elements_of_phase_1(dy[v], weight[v], y[v], bias[v], total_part, total_2_part, column_total_part);
                total_of[v % PARTIALS] += total_part;
                total_2_of[v % PARTIALS] += total_2_part;
                column_total[c][v] += column_total_part;
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
        row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET) + turn * WARPS);
        row_sum_f32_store_partial(total_2_of[0], shared_array<float>(TOTAL_2_OFFSET) + turn * WARPS);
        block_sync();
        const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET) + turn * WARPS);
        const float total_2 = row_sum_f32_combine_partials(shared_array<float>(TOTAL_2_OFFSET) + turn * WARPS);

        // Phase 2 of 2: computes mean, mean_2; writes dx.
        float mean;
        float mean_2;
        mean_and_mean_2_of(total, total_2, mean, mean_2);
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            float weight[LANES];
            widen_vec(weight_raw[c], weight);
            float bias[LANES];
            widen_vec(bias_raw[c], bias);
            float dy[LANES];
            bf16 dy_raw[LANES];
            shared_load_vec(dy_raw, dy_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(dy_raw, dy);
            float y[LANES];
            bf16 y_raw[LANES];
            shared_load_vec(y_raw, y_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(y_raw, y);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
            float result[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                result[v] = result_of(dy[v], y[v], rstd, mean, mean_2, weight[v], bias[v]);
            }
            bf16 result_raw[LANES];
            narrow_vec(result, result_raw);
            store_lanes<LANES>(dx_ptr, row * COLUMNS + column, result_raw);
        }
        turn ^= 1;
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
}  // namespace layer_norm_invertible_backward_1

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 128;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 2;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_layer_norm_invertible_backward_0_to_1(i64 layer_norm_invertible_backward_0_blocks, const bf16* weight_ptr,
        bool* has_zero_ptr, const bf16* dy_ptr, const bf16* y_ptr, const bf16* bias_ptr, const float* rstd_ptr,
        bf16* dx_ptr, float* partial_column_total_ptr, float* partial_column_total_2_ptr, i64 y_dim0) {
    i32 block = block_id();
    if (block < layer_norm_invertible_backward_0_blocks) {
        layer_norm_invertible_backward_0::run(block, weight_ptr, has_zero_ptr);
        return;
    }
    block -= static_cast<i32>(layer_norm_invertible_backward_0_blocks);
    layer_norm_invertible_backward_1::run(block, dy_ptr, weight_ptr, y_ptr, bias_ptr, rstd_ptr, dx_ptr,
            partial_column_total_ptr, partial_column_total_2_ptr, y_dim0);
}
