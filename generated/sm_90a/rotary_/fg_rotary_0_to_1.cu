// rotary_0: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * q_dim2 * 64 + 1023) // 1024), block 128.
// Reads q_dim0 * q_dim1 * q_dim2 * 256 + q_dim2 * 512 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// rotary_1: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((k_dim1 * q_dim0 * q_dim2 * 64 + 1023) // 1024), block 128.
// Reads k_dim1 * q_dim0 * q_dim2 * 256 + q_dim2 * 512 bytes, writes k_dim1 * q_dim0 * q_dim2 * 256.
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
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void rotary_0(float q, float cos_, float q_2, float sin_, float cos__2, float sin__2, float& result, float& result_2) {
    result = q * cos_ + -q_2 * sin_;                                                  // line 8: return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, c…
    result_2 = q_2 * cos__2 + q * sin__2;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* cos_ptr, const bf16* sin_ptr, bf16* q_ptr, i64 q_dim0, i64 q_dim1, i64 q_dim2) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = q_dim0 * q_dim1 * q_dim2 * 64;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 q_raw[UNROLL][LANES];
    bf16 cos__raw[UNROLL][LANES];
    bf16 q_2_raw[UNROLL][LANES];
    bf16 sin__raw[UNROLL][LANES];
    bf16 cos__2_raw[UNROLL][LANES];
    bf16 sin__2_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 64;
        const Index i3 = position - i3_outer * 64;
        const Index i1 = i3_outer / static_cast<Index>(q_dim2);
        const Index i2 = i3_outer - i1 * static_cast<Index>(q_dim2);
        load_lanes<8>(q_raw[u], q_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3);
        load_lanes<8>(cos__raw[u], cos_ptr, i2 * 128 + i3);
        load_lanes<8>(q_2_raw[u], q_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3 + 64);
        load_lanes<8>(sin__raw[u], sin_ptr, i2 * 128 + i3);
        load_lanes<8>(cos__2_raw[u], cos_ptr, i2 * 128 + i3 + 64);
        load_lanes<8>(sin__2_raw[u], sin_ptr, i2 * 128 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 64;
        const Index i3 = position - i3_outer * 64;
        const Index i1 = i3_outer / static_cast<Index>(q_dim2);
        const Index i2 = i3_outer - i1 * static_cast<Index>(q_dim2);
        float q[8];
        widen_vec(q_raw[u], q);
        float cos_[8];
        widen_vec(cos__raw[u], cos_);
        float q_2[8];
        widen_vec(q_2_raw[u], q_2);
        float sin_[8];
        widen_vec(sin__raw[u], sin_);
        float cos__2[8];
        widen_vec(cos__2_raw[u], cos__2);
        float sin__2[8];
        widen_vec(sin__2_raw[u], sin__2);
        float result[8];
        float result_2[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) rotary_0(q[v], cos_[v], q_2[v], sin_[v], cos__2[v], sin__2[v], result[v], result_2[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(q_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3, result_raw);
        bf16 result_2_raw[8];
        narrow_vec(result_2, result_2_raw);
        store_lanes<8>(q_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3 + 64, result_2_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void rotary_1(float k_, float cos_, float k__2, float sin_, float cos__2, float sin__2, float& result, float& result_2) {
    result = k_ * cos_ + -k__2 * sin_;                                                // line 8: return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, c…
    result_2 = k__2 * cos__2 + k_ * sin__2;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* cos_ptr, const bf16* sin_ptr, bf16* k_ptr, i64 k_dim1, i64 q_dim0, i64 q_dim2) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = k_dim1 * q_dim0 * q_dim2 * 64;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 k__raw[UNROLL][LANES];
    bf16 cos__raw[UNROLL][LANES];
    bf16 k__2_raw[UNROLL][LANES];
    bf16 sin__raw[UNROLL][LANES];
    bf16 cos__2_raw[UNROLL][LANES];
    bf16 sin__2_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 64;
        const Index i3 = position - i3_outer * 64;
        const Index i1 = i3_outer / static_cast<Index>(q_dim2);
        const Index i2 = i3_outer - i1 * static_cast<Index>(q_dim2);
        load_lanes<8>(k__raw[u], k_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3);
        load_lanes<8>(cos__raw[u], cos_ptr, i2 * 128 + i3);
        load_lanes<8>(k__2_raw[u], k_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3 + 64);
        load_lanes<8>(sin__raw[u], sin_ptr, i2 * 128 + i3);
        load_lanes<8>(cos__2_raw[u], cos_ptr, i2 * 128 + i3 + 64);
        load_lanes<8>(sin__2_raw[u], sin_ptr, i2 * 128 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 64;
        const Index i3 = position - i3_outer * 64;
        const Index i1 = i3_outer / static_cast<Index>(q_dim2);
        const Index i2 = i3_outer - i1 * static_cast<Index>(q_dim2);
        float k_[8];
        widen_vec(k__raw[u], k_);
        float cos_[8];
        widen_vec(cos__raw[u], cos_);
        float k__2[8];
        widen_vec(k__2_raw[u], k__2);
        float sin_[8];
        widen_vec(sin__raw[u], sin_);
        float cos__2[8];
        widen_vec(cos__2_raw[u], cos__2);
        float sin__2[8];
        widen_vec(sin__2_raw[u], sin__2);
        float result[8];
        float result_2[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) rotary_1(k_[v], cos_[v], k__2[v], sin_[v], cos__2[v], sin__2[v], result[v], result_2[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(k_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3, result_raw);
        bf16 result_2_raw[8];
        narrow_vec(result_2, result_2_raw);
        store_lanes<8>(k_ptr, i1 * q_dim2 * 128 + i2 * 128 + i3 + 64, result_2_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 8)
fg_rotary_0_to_1(i64 blocks_1, const bf16* cos_ptr, const bf16* sin_ptr, bf16* q_ptr, bf16* k_ptr, i64 q_dim0, i64 q_dim1, i64 q_dim2, i64 k_dim1) {
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), cos_ptr, sin_ptr, q_ptr, q_dim0, q_dim1, q_dim2);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, cos_ptr, sin_ptr, k_ptr, k_dim1, q_dim0, q_dim2);
}
