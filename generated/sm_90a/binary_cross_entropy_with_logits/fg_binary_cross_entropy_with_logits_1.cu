// binary_cross_entropy_with_logits_1: row reduction, 2 phases, rows read once into registers, emitted by fusegen for
// sm_90a.
// Grid 1, block 992, 256 bytes of shared memory: a row fits the registers of 992 threads, 17 elements per thread.
// Reads input_dim0 * 4 bytes, writes 2.
// Indices have 32 bits: tensors of 2^31 - 2^22 elements or more take a kernel of their own.
#include "../primitives/types.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.bf16.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.bf16.float.cuh"
#include "../primitives/store.bf16.float.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.float.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// binary_cross_entropy_with_logits in loss.py; its first line is 0:
//    9: return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weigh…

__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ float quotient_of_binary_cross_entropy_with_logits_1(float total, i64 coordinate) {
    return fast_divide(total, static_cast<float>(coordinate));                        // line 9
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 1;  // vector width
constexpr i32 THREADS = 992;  // per row
constexpr i32 WARPS = 31;
constexpr i32 MEETING = 32;  // lanes that each take the partial result of a warp: a power of two
constexpr i32 SUMS = 1;  // independent partial sums per thread, which hide the latency of additions
constexpr i32 CHUNKS = 17;  // vectors per thread
constexpr i32 total_offset = 0;  // in shared memory, in bytes

// Writes a warp's partial result to shared memory; after a barrier, row_sum_f32_meet combines those of all warps.
template <typename Scratch>
__device__ __forceinline__ void row_sum_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = sum_f32_identity();
    if (warp < WARPS) value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(992)
fg_binary_cross_entropy_with_logits_1(const float* value_18_ptr, bf16* out_ptr, i64 input_dim0) {
    wait_for_previous();
    const Index column_count = input_dim0;
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces each row to total.
    float total_of[SUMS];
#pragma unroll
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const Index i0 = column;
        float value_18_raw[LANES];
        for (i32 v = 0; v < 1; ++v) value_18_raw[v] = load(value_18_ptr, i0);
        float value_18[LANES];
        widen_vec(value_18_raw, value_18);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], value_18[v]);
        }
    }
    float total = total_of[0];
    row_sum_f32_leave(total, shared_array<float>(total_offset));
    block_sync();
    total = row_sum_f32_meet(shared_array<float>(total_offset));

    // Phase 2 of 2: computes quotient; writes out.
    const float quotient = quotient_of_binary_cross_entropy_with_logits_1(total, input_dim0 * 4096);
    if (thread == 0) {
        store_narrowed(out_ptr, 0, quotient);
    }
}
