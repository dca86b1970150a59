// binary_cross_entropy_with_logits_0: row reduction, 2 phases, rows read once into registers, emitted by fusegen for
// sm_90a.
// Grid input_dim0, block 128, 16 bytes of shared memory: a row fits the registers of 128 threads, 32 elements per
// thread.
// Reads input_dim0 * 16384 bytes, writes input_dim0 * 4.
// target, input: bf16 [input_dim0, 4096]; total: float [input_dim0, 1]; all contiguous, 16-byte aligned.
// A launch of its own reads total: row reduction.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_log2.cuh"
#include "../primitives/fast_log.cuh"
#include "../primitives/fast_log1p.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/minimum.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.float.cuh"
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
// binary_cross_entropy_with_logits in fusegen/specs/loss.py; its def is line 1:
//    8: return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)

__device__ __forceinline__ float negative_of(float target, float input) {
    const float logarithm = fast_log1p(fast_exp(-fabsf(input)));                      // line 8
    const float product = (1.0f - target) * (minimum(-input, 0.0f) - logarithm);
    return -(target * (minimum(input, 0.0f) - logarithm) + product);
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
fg_binary_cross_entropy_with_logits_0(const bf16* target_ptr, const bf16* input_ptr, float* total_ptr) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to total.
    bf16 target_raw[CHUNKS][LANES];
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(target_raw[c], target_ptr, row * COLUMNS + column);
        load_lanes<LANES>(input_raw[c], input_ptr, row * COLUMNS + column);
    }
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float target[LANES];
        widen_vec(target_raw[c], target);
        float input[LANES];
        widen_vec(input_raw[c], input);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float total_part = negative_of(target[v], input[v]);
            total_of[v % PARTIALS] += total_part;
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

    // Phase 2 of 2: writes total.
    launch_dependents();
    if (thread == 0) {
        store_narrowed(total_ptr, row, total);
    }
}
