// linear_cross_entropy_2: row reduction, 2 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid 1, block 512, 128 bytes of shared memory: a row fits the registers of 512 threads, 8 elements per thread.
// Reads 12288 bytes, writes 2.
// differs: bool [4096]; gathered: bf16 [4096, 1]; out: bf16 []; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.8.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/store.bf16.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bool.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// loss_of in fusegen/specs/loss.py; its def is line 1:
//   14: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction,
//       label_smoothing=label_smoothing)

__device__ __forceinline__ void elements_of_phase_1(bool differs, float gathered, float& true_count_part,
        float& total_part) {
    true_count_part = differs ? 1.0f : 0.0f;                                          // line 14
    total_part = differs ? -gathered : 0.0f;
}

__device__ __forceinline__ float quotient_of(float total, float true_count) {
    return fast_divide(total, true_count);                                            // line 14
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 512;  // per row
constexpr i32 WARPS = 16;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 1;  // vectors per thread: CHUNKS * THREADS * LANES = 4096
constexpr i32 TRUE_COUNT_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 TOTAL_OFFSET = 64;

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

extern "C" __global__ void __launch_bounds__(THREADS)
fg_linear_cross_entropy_2(const bool* differs_ptr, const bf16* gathered_ptr, bf16* out_ptr) {
    const i32 thread = thread_id();
    bool differs_raw[CHUNKS][LANES];
    bf16 gathered_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(differs_raw[c], differs_ptr, column);
        load_lanes<LANES>(gathered_raw[c], gathered_ptr, column);
    }

    // Phase 1 of 2: reduces the row to true_count, total.
    float true_count_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) true_count_of[k] = 0.0f;
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        bool differs[LANES];
        widen_vec(differs_raw[c], differs);
        float gathered[LANES];
        widen_vec(gathered_raw[c], gathered);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            float true_count_part;
            float total_part;
            elements_of_phase_1(differs[v], gathered[v], true_count_part, total_part);
            true_count_of[v % PARTIALS] += true_count_part;
            total_of[v % PARTIALS] += total_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) true_count_of[k] += true_count_of[k + half];
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] += total_of[k + half];
    }
    row_sum_f32_store_partial(true_count_of[0], shared_array<float>(TRUE_COUNT_OFFSET));
    row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET));
    block_sync();
    const float true_count = row_sum_f32_combine_partials(shared_array<float>(TRUE_COUNT_OFFSET));
    const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET));

    // Phase 2 of 2: computes quotient; writes out.
    const float quotient = quotient_of(total, true_count);
    if (thread == 0) {
        store_narrowed(out_ptr, 0, quotient);
    }
}
