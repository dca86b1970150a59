// scale_mask_softmax: row reduction, 3 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid scores_dim0 * scores_dim1 * 128, block 256: a row fits the registers of 32 threads, 32 elements per thread.
// Reads scores_dim0 * 2048 + scores_dim0 * scores_dim1 * 2097152 bytes, writes scores_dim0 * scores_dim1 * 2097152.
// scores, out: bf16 [scores_dim0, scores_dim1, 1024, 1024]; mask: bf16 [scores_dim0, 1, 1, 1024]; all contiguous,
// 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// scale_mask_softmax in fusegen/specs/softmax.py; its def is line 1:
//   21: scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
//   25: return fg.dropout(torch.softmax(scores, -1), p, training, seed=seed)

__device__ __forceinline__ float amax_f32_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float scores_of(float scale, float scores, float mask) {
    return scores * scale + mask;                                                     // line 21
}

__device__ __forceinline__ float exponential_of(float scores, float mask, float scale, float largest) {
    return fast_exp(scores * scale + mask - largest);                                 // line 25
}

__device__ __forceinline__ float result_of(float exponential, float total) {
    return fast_divide(exponential, total);                                           // line 25
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 1024;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 32;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 ROWS = 8;  // per block at a time
constexpr i32 CHUNKS = 4;  // vectors per thread: CHUNKS * THREADS * LANES = COLUMNS
constexpr i32 BLOCKS_PER_SM = 4;  // at least, which limits the registers of a thread

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ float row_amax_f32(float value) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ float row_sum_f32(float value) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, BLOCKS_PER_SM)
fg_scale_mask_softmax(const bf16* scores_ptr, const bf16* mask_ptr, bf16* out_ptr, i64 scores_dim1_extent,
        i64 scores_dim0_extent, double scale) {
    const Index scores_dim1 = static_cast<Index>(scores_dim1_extent);
    const Index scores_dim0 = static_cast<Index>(scores_dim0_extent);
    const Index row_count = scores_dim0 * scores_dim1 * 1024;
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    const Index row = static_cast<Index>(block_id()) * ROWS + group;
    if (row >= row_count) return;
    const Index i0 = row / (scores_dim1 * 1024);

    // Phase 1 of 3: reduces the row to largest.
    bf16 scores_raw[CHUNKS][LANES];
    bf16 mask_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(scores_raw[c], scores_ptr, row * COLUMNS + column);
        load_lanes<LANES>(mask_raw[c], mask_ptr, i0 * 1024 + column);
    }
    float largest_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float scores[LANES];
        widen_vec(scores_raw[c], scores);
        float mask[LANES];
        widen_vec(mask_raw[c], mask);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float largest_part = scores_of(static_cast<float>(scale), scores[v], mask[v]);
            largest_of[v % PARTIALS] = amax_f32_combine(largest_of[v % PARTIALS], largest_part);
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
    }
    const float largest = row_amax_f32(largest_of[0]);

    // Phase 2 of 3: reduces the row to total; stores exponential for later phases.
    float exponential_kept[CHUNKS][LANES];
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float scores[LANES];
        widen_vec(scores_raw[c], scores);
        float mask[LANES];
        widen_vec(mask_raw[c], mask);
        float exponential[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            exponential[v] = exponential_of(scores[v], mask[v], static_cast<float>(scale), largest);
            total_of[v % PARTIALS] += exponential[v];
            exponential_kept[c][v] = exponential[v];
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] += total_of[k + half];
    }
    const float total = row_sum_f32(total_of[0]);

    // Phase 3 of 3: writes out.
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        const float (&exponential)[LANES] = exponential_kept[c];
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = result_of(exponential[v], total);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(out_ptr, row * COLUMNS + column, result_raw);
    }
}
