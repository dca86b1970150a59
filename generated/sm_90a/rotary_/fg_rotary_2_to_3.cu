// rotary_2: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * q_dim2 * 128 + 1023) // 1024), block 128.
// Reads q_dim0 * q_dim1 * q_dim2 * 256 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// rotary_3: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((k_dim1 * q_dim0 * q_dim2 * 128 + 1023) // 1024), block 128.
// Reads k_dim1 * q_dim0 * q_dim2 * 256 bytes, writes k_dim1 * q_dim0 * q_dim2 * 256.
#include "../primitives/types.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_2(float value_10) {
    return value_10;                                                                  // line 7: return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, c…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* value_10_ptr, bf16* q_ptr, i64 q_dim0, i64 q_dim1, i64 q_dim2) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = q_dim0 * q_dim1 * q_dim2 * 128;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 value_10_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(value_10_raw[u], value_10_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float value_10[8];
        widen_vec(value_10_raw[u], value_10);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_2(value_10[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(q_ptr, position, result_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_3(float value_17) {
    return value_17;                                                                  // line 7: return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, c…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* value_17_ptr, bf16* k_ptr, i64 k_dim1, i64 q_dim0, i64 q_dim2) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = k_dim1 * q_dim0 * q_dim2 * 128;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 value_17_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(value_17_raw[u], value_17_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float value_17[8];
        widen_vec(value_17_raw[u], value_17);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_3(value_17[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(k_ptr, position, result_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_rotary_2_to_3(i64 blocks_1, const bf16* value_10_ptr, bf16* q_ptr, const bf16* value_17_ptr, bf16* k_ptr, i64 q_dim0, i64 q_dim1, i64 q_dim2, i64 k_dim1) {
    wait_for_previous();
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), value_10_ptr, q_ptr, q_dim0, q_dim1, q_dim2);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, value_17_ptr, k_ptr, k_dim1, q_dim0, q_dim2);
}
