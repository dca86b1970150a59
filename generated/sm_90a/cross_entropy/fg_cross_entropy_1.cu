// cross_entropy_1: pointwise, 2 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid 32, block 128.
// Reads 65536 bytes, writes 65536.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.i64.cuh"
#include "../primitives/narrow_vec.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/widen.i64.cuh"
#include "../primitives/widen_vec.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ i64 cross_entropy_1(i64 target, i64 ignore_index) {
    return target != ignore_index ? target : 0LL;                                     // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_cross_entropy_1(const i64* target_ptr, i64* value_13_ptr, i64 ignore_index) {
    wait_for_previous();
    constexpr i32 LANES = 2;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    i64 target_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<2>(target_raw[u], target_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        i64 target[2];
        widen_vec(target_raw[u], target);
        i64 result[2];
#pragma unroll
        for (i32 v = 0; v < 2; ++v) result[v] = cross_entropy_1(target[v], ignore_index);
        i64 result_raw[2];
        narrow_vec(result, result_raw);
        store_lanes<2>(value_13_ptr, position, result_raw);
    }
}
