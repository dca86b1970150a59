// cross_entropy_1: row reduction, 2 phases, rows read once, nothing of them held, emitted by fusegen for sm_90a.
// Grid 1, block 1024, 256 bytes of shared memory: one phase alone needs the elements of a row, so that nothing holds
// them.
// Reads 147456 bytes, writes 2.
// target: i64 [8192]; input: bf16 [8192, 32000]; normalizer_peak, normalizer_mass: float [8192, 1]; out: bf16 []; all
// contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
#include "../primitives/choose.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.bf16.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/nan_unless_finite.cuh"
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
#include "../primitives/widen.i64.bf16.float.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// loss_of in fusegen/specs/loss.py; its def is line 1:
//   14: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction,
//       label_smoothing=label_smoothing)

__device__ __forceinline__ void elements_of_phase_1(i64 ignore_index, i64 target, float input, float normalizer_peak,
        float normalizer_mass, float& total_part, float& true_count_part) {
    const bool differs = target != ignore_index;                                      // line 14
    const float logarithm = logf(normalizer_mass + nan_unless_finite(normalizer_peak));
    total_part = differs ? -(input - normalizer_peak - logarithm) : 0.0f;
    true_count_part = differs ? 1.0f : 0.0f;
}

__device__ __forceinline__ float quotient_of(float total, float true_count) {
    return fast_divide(total, true_count);                                            // line 14
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 8192;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 1024;  // per row
constexpr i32 WARPS = 32;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 TRUE_COUNT_OFFSET = 128;

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
fg_cross_entropy_1(const i64* target_ptr, const bf16* input_ptr, const float* normalizer_peak_ptr,
        const float* normalizer_mass_ptr, bf16* out_ptr, i64 ignore_index) {
    wait_for_previous();
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to total, true_count.
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
    float true_count_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) true_count_of[k] = 0.0f;
#pragma unroll 4
    for (Index column = thread * LANES; column < COLUMNS; column += THREADS * LANES) {
        i64 target_raw[LANES];
        load_lanes<2>(target_raw, target_ptr, column);
        bf16 input_raw[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            input_raw[v] = load(input_ptr, column * 32000 + v * 32000
                    + checked_index(choose(target_raw[v] != ignore_index, target_raw[v], 0), 32000,
                    "fusegen: cross_entropy_1: index of a computed tensor out of range [0, 32000)"));
        }
        float normalizer_peak_raw[LANES];
        load_lanes<4>(normalizer_peak_raw, normalizer_peak_ptr, column);
        float normalizer_mass_raw[LANES];
        load_lanes<4>(normalizer_mass_raw, normalizer_mass_ptr, column);
        i64 target[LANES];
        widen_vec(target_raw, target);
        float input[LANES];
        widen_vec(input_raw, input);
        float normalizer_peak[LANES];
        widen_vec(normalizer_peak_raw, normalizer_peak);
        float normalizer_mass[LANES];
        widen_vec(normalizer_mass_raw, normalizer_mass);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            float total_part;
            float true_count_part;
            elements_of_phase_1(ignore_index, target[v], input[v], normalizer_peak[v], normalizer_mass[v], total_part,
                    true_count_part);
            total_of[v % PARTIALS] += total_part;
            true_count_of[v % PARTIALS] += true_count_part;
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
        for (i32 k = 0; k < half; ++k) true_count_of[k] += true_count_of[k + half];
    }
    row_sum_f32_store_partial(total_of[0], shared_array<float>(TOTAL_OFFSET));
    row_sum_f32_store_partial(true_count_of[0], shared_array<float>(TRUE_COUNT_OFFSET));
    block_sync();
    const float total = row_sum_f32_combine_partials(shared_array<float>(TOTAL_OFFSET));
    const float true_count = row_sum_f32_combine_partials(shared_array<float>(TRUE_COUNT_OFFSET));

    // Phase 2 of 2: computes quotient; writes out.
    const float quotient = quotient_of(total, true_count);
    if (thread == 0) {
        store_narrowed(out_ptr, 0, quotient);
    }
}
