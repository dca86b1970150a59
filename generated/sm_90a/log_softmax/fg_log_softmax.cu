// log_softmax: row reduction, 3 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid input_dim0, block 128, 32 bytes of shared memory: a row fits the registers of 128 threads, 32 elements per
// thread.
// Reads input_dim0 * 8192 bytes, writes input_dim0 * 8192.
// input, out: bf16 [input_dim0, 4096], contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
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
// log_softmax in fusegen/specs/softmax.py; its def is line 1:
//    6: return F.log_softmax(cooled(input, temperature), dim)

__device__ __forceinline__ float amax_f32_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float exponential_of(float input, float largest) {
    return fast_exp(input - largest);                                                 // line 6
}

__device__ __forceinline__ float logarithm_of(float total) {
    return logf(total);                                                               // line 6
}

__device__ __forceinline__ float result_of(float input, float largest, float logarithm) {
    return input - largest - logarithm;                                               // line 6
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
constexpr i32 LARGEST_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 TOTAL_OFFSET = 16;

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
fg_log_softmax(const bf16* input_ptr, bf16* out_ptr) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 3: reduces the row to largest.
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<LANES>(input_raw[c], input_ptr, row * COLUMNS + column);
    }
    float largest_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float input[LANES];
        widen_vec(input_raw[c], input);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            largest_of[v % PARTIALS] = amax_f32_combine(largest_of[v % PARTIALS], input[v]);
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
    }
    row_amax_f32_store_partial(largest_of[0], shared_array<float>(LARGEST_OFFSET));
    block_sync();
    const float largest = row_amax_f32_combine_partials(shared_array<float>(LARGEST_OFFSET));

    // Phase 2 of 3: reduces the row to total.
    float total_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) total_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float input[LANES];
        widen_vec(input_raw[c], input);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float total_part = exponential_of(input[v], largest);
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

    // Phase 3 of 3: computes logarithm; writes out.
    const float logarithm = logarithm_of(total);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        float input[LANES];
        widen_vec(input_raw[c], input);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = result_of(input[v], largest, logarithm);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(out_ptr, row * COLUMNS + column, result_raw);
    }
}
