// modulated_layer_norm: row reduction, 3 phases, rows read once into shared memory, emitted by fusegen for sm_90a.
// Grid min(x_dim0 * 4096, 528), block 192, 18560 bytes of shared memory: the shared memory of a block holds a row and
// the next ones, which are prefetched.
// Reads x_dim0 * 33570816 bytes, writes x_dim0 * 33554432.
// x, out: bf16 [x_dim0, 4096, 4096]; scale, shift: bf16 [x_dim0, 4096]; all contiguous, 16-byte aligned.
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
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
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
// modulated_layer_norm in fusegen/specs/normalization.py; its def is line 1:
//    9: normalized = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
// modulated in fusegen/specs/normalization.py; its def is line 1:
//    9: return scaled if shift is None else scaled + shift

__device__ __forceinline__ float mean_of(float total) {
    return total * (1.0f / 4096.0f);                                                  // modulated_layer_norm, line 9
}

__device__ __forceinline__ float squared_deviation(float x, float mean) {
    const float difference = x - mean;                                                // modulated_layer_norm, line 9
    return difference * difference;
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // modulated_layer_norm, line 9
}

__device__ __forceinline__ float normalized(float x, float mean, float rstd, float scale, float shift) {
    return (x - mean) * rstd * (1.0f + scale) + shift;                                // modulated, line 9
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 4096;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 192;  // per row
constexpr i32 WARPS = 6;  // per row
constexpr i32 COMBINING_LANES = 8;  // at least one per warp: a power of two
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 3;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS
constexpr i32 FORESEEN = 2;  // vectors that a thread prefetches
constexpr i32 SLOTS = 6;  // pipeline stages: vectors per thread in shared memory
constexpr i32 AHEAD = SLOTS - CHUNKS;  // of them for later rows
constexpr i32 SLOT = THREADS * LANES;  // elements between stages
constexpr i32 BLOCKS_PER_SM = 4;  // at least, which limits the registers of a thread
constexpr i32 TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 SQUARES_OFFSET = 32;
constexpr i32 X_OFFSET = 128;

// Stores a warp's partial result; after a barrier, row_sum_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_sum_f32_store_partial(float value, SharedArray<float> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ float row_sum_f32_combine_partials(SharedArray<float> scratch) {
    const i32 warp = lane_id() % COMBINING_LANES;
    float value = 0.0f;
    if (warp < WARPS) value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = COMBINING_LANES / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_modulated_layer_norm(const bf16* x_ptr, const bf16* scale_ptr, const bf16* shift_ptr, bf16* out_ptr,
        i64 x_dim0_extent, double eps) {
    const Index x_dim0 = static_cast<Index>(x_dim0_extent);
    const Index row_count = x_dim0 * 4096;
    const i32 thread = thread_id();
    // This block's share of the rows.
    constexpr i32 PARTS = 528;  // at most: every block has rows
    const Index part = block_id();
    auto x_staged = shared_array<bf16>(X_OFFSET);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // consecutive; opaque: not kept in a register
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < COLUMNS) {
            copy_async<LANES>(x_staged, slot * SLOT + thread * LANES, x_ptr, row * COLUMNS + column);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();
        const Index i0 = row / 4096;

        // Phase 1 of 3: reduces the row to total.
        bf16 x_raw[CHUNKS][LANES];
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            shared_load_vec(x_raw[c], x_staged, slot_of(c) * SLOT + thread * LANES);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
        }
        float total_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) continue;
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
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) continue;
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
        bf16 scale_next[FORESEEN][LANES];
        bf16 shift_next[FORESEEN][LANES];
#pragma unroll
        for (i32 c = 0; c < FORESEEN; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column < COLUMNS) {
                load_lanes<LANES>(scale_next[c], scale_ptr, i0 * 4096 + column);
                load_lanes<LANES>(shift_next[c], shift_ptr, i0 * 4096 + column);
            }
        }
        row_sum_f32_store_partial(squares_of[0], shared_array<float>(SQUARES_OFFSET));
        block_sync();
        const float squares = row_sum_f32_combine_partials(shared_array<float>(SQUARES_OFFSET));

        // Phase 3 of 3: computes rstd; writes out.
        const float rstd = rstd_of(squares, static_cast<float>(eps));
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) continue;
            bf16 scale_raw[LANES];
            memcpy(scale_raw, scale_next[c % FORESEEN], sizeof(scale_raw));
            bf16 shift_raw[LANES];
            memcpy(shift_raw, shift_next[c % FORESEEN], sizeof(shift_raw));
            if (c + FORESEEN < CHUNKS) {
                const Index column = ((c + FORESEEN) * THREADS + thread) * LANES;
                if (column < COLUMNS) {
                    load_lanes<LANES>(scale_next[c % FORESEEN], scale_ptr, i0 * 4096 + column);
                    load_lanes<LANES>(shift_next[c % FORESEEN], shift_ptr, i0 * 4096 + column);
                }
            }
            float scale[LANES];
            widen_vec(scale_raw, scale);
            float shift[LANES];
            widen_vec(shift_raw, shift);
            float x[LANES];
            widen_vec(x_raw[c], x);
            float result[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                result[v] = normalized(x[v], mean, rstd, scale[v], shift[v]);
            }
            bf16 result_raw[LANES];
            narrow_vec(result, result_raw);
            store_lanes<LANES>(out_ptr, row * COLUMNS + column, result_raw);
        }
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
}
