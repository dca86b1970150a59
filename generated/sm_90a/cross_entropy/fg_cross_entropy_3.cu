// cross_entropy_3: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 1, block 128.
// Reads 8 bytes, writes 2.
#include "../primitives/types.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.bf16.float.cuh"
#include "../primitives/narrow.bf16.float.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store.bf16.float.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/widen.bf16.float.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float cross_entropy_3(float value_21, float value_23) {
    return fast_divide(value_21, value_23);                                           // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_cross_entropy_3(const float* value_21_ptr, const float* value_23_ptr, bf16* out_ptr) {
    wait_for_previous();
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 1;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    float value_21_raw[UNROLL];
    float value_23_raw[UNROLL];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        value_21_raw[u] = load(value_21_ptr, 0);
        value_23_raw[u] = load(value_23_ptr, 0);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const float value_21 = widen(value_21_raw[u]);
        const float value_23 = widen(value_23_raw[u]);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = cross_entropy_3(value_21, value_23);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store(out_ptr, 0, result_raw[0]);
    }

    // What is left at the end is less than a group of lanes.
    const Index position = element_count / LANES * LANES + thread_id();
    if (block_id() == block_count() - 1 && position < element_count) {
        float value_21_raw;
        float value_23_raw;
        value_21_raw = load(value_21_ptr, 0);
        value_23_raw = load(value_23_ptr, 0);
        const float value_21 = widen(value_21_raw);
        const float value_23 = widen(value_23_raw);
        float result[1];
        for (i32 v = 0; v < 1; ++v) result[v] = cross_entropy_3(value_21, value_23);
        bf16 result_raw[1];
        narrow_vec(result, result_raw);
        store(out_ptr, 0, result_raw[0]);
    }
}
