// binary_cross_entropy_with_logits_1: row reduction, 2 phases, rows read once into registers, emitted by fusegen for
// sm_90a.
// Grid 1, block 992, 128 bytes of shared memory: a row fits the registers of 992 threads, 17 elements per thread.
// Reads input_dim0 * 4 bytes, writes 2.
// total: float [input_dim0, 1]; out: bf16 []; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/store.bf16.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.float.cuh"
#include "../primitives/widen_vec.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// binary_cross_entropy_with_logits in fusegen/specs/loss.py; its def is line 1:
//    8: return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)

__device__ __forceinline__ float quotient_of(float total_2, i64 coordinate) {
    return fast_divide(total_2, static_cast<float>(coordinate));                      // line 8
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 1;  // vector width
constexpr i32 THREADS = 992;  // per row
constexpr i32 WARPS = 31;  // per row
constexpr i32 COMBINING_LANES = 32;  // at least one per warp: a power of two
constexpr i32 PARTIALS = 1;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 17;  // vectors per thread: CHUNKS * THREADS * LANES >= input_dim0
constexpr i32 TOTAL_2_OFFSET = 0;  // in shared memory, in bytes

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

extern "C" __global__ void __launch_bounds__(THREADS)
fg_binary_cross_entropy_with_logits_1(const float* total_ptr, bf16* out_ptr, i64 input_dim0_extent) {
    const Index input_dim0 = static_cast<Index>(input_dim0_extent);
    wait_for_previous();
    const Index column_count = input_dim0;
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to total_2.
    float total_2_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_2_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const Index i0 = column;
        float total_raw[LANES];
        for (i32 v = 0; v < 1; ++v) total_raw[v] = load(total_ptr, i0);
        float total[LANES];
        widen_vec(total_raw, total);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_2_of[v % PARTIALS] += total[v];
        }
    }
    row_sum_f32_store_partial(total_2_of[0], shared_array<float>(TOTAL_2_OFFSET));
    block_sync();
    const float total_2 = row_sum_f32_combine_partials(shared_array<float>(TOTAL_2_OFFSET));

    // Phase 2 of 2: computes quotient; writes out.
    const float quotient = quotient_of(total_2, i64(input_dim0) * 4096);
    if (thread == 0) {
        store_narrowed(out_ptr, 0, quotient);
    }
}
