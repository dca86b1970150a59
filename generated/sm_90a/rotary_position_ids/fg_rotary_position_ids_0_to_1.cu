// rotary_position_ids_0: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * 524288 + 1023) // 1024), block 128.
// Reads q_dim0 * q_dim1 * 1048576 + q_dim0 * 32768 bytes, writes q_dim0 * q_dim1 * 1048576.
// rotary_position_ids_1: pointwise, 8 elements a thread at a time, emitted by fusegen for sm_90a.
// Grid ((k_dim1 * q_dim0 * 524288 + 1023) // 1024), block 128.
// Reads k_dim1 * q_dim0 * 1048576 + q_dim0 * 32768 bytes, writes k_dim1 * q_dim0 * 1048576.
#include "../primitives/types.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.bf16.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/round_bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/wrap_mul.cuh"

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_position_ids_0(float q, i64 position_ids, i64 position_ids_2, float q_2, float q_3, i64 coordinate, i64 coordinate_2, bool coordinate_3) {
    const float pow_1 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate, 2LL)), 128.0f));  // line 34: frequencies, magnitude = 1.0 / base**exponents, 1.0
    const float pow_2 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate_2, 2LL)), 128.0f));
    const float where_1 = coordinate_3 ? static_cast<float>(position_ids_2) * fast_divide(1.0f, pow_2) : static_cast<float>(position_ids) * fast_divide(1.0f, pow_1);
    return q * round_bf16(cosf(where_1)) + (coordinate_3 ? -q_3 : q_2) * round_bf16(sinf(where_1));  // line 16: result = turned * cos + torch.cat((-b, a), -1) * sin
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* q_ptr, const i64* position_ids_ptr, bf16* out_0_ptr, i64 q_dim0, i64 q_dim1) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = q_dim0 * q_dim1 * 524288;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 q_raw[UNROLL][LANES];
    i64 position_ids_raw[UNROLL][LANES] = {};
    i64 position_ids_2_raw[UNROLL][LANES] = {};
    bf16 q_2_raw[UNROLL][LANES] = {};
    bf16 q_3_raw[UNROLL][LANES] = {};
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / q_dim1;
        const Index i1 = i2_outer - i0 * q_dim1;
        load_lanes<8>(q_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3);
        for (i32 v = 0; v < 8; ++v) if (i3 + v >= 64) position_ids_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        for (i32 v = 0; v < 8; ++v) if (i3 + v < 64) position_ids_2_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        if (i3 >= 64) load_lanes<8>(q_2_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3 - 64);
        if (i3 < 64) load_lanes<8>(q_3_raw[u], q_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / q_dim1;
        const Index i1 = i2_outer - i0 * q_dim1;
        float q[8];
        widen_vec(q_raw[u], q);
        i64 position_ids[8];
        widen_vec(position_ids_raw[u], position_ids);
        i64 position_ids_2[8];
        widen_vec(position_ids_2_raw[u], position_ids_2);
        float q_2[8];
        widen_vec(q_2_raw[u], q_2);
        float q_3[8];
        widen_vec(q_3_raw[u], q_3);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_position_ids_0(q[v], position_ids[v], position_ids_2[v], q_2[v], q_3[v], i3 + v - 64, i3 + v, i3 + v < 64);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_0_ptr, i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3, result_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float rotary_position_ids_1(float k_, i64 position_ids, i64 position_ids_2, float k__2, float k__3, i64 coordinate, i64 coordinate_2, bool coordinate_3) {
    const float pow_1 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate, 2LL)), 128.0f));  // line 34: frequencies, magnitude = 1.0 / base**exponents, 1.0
    const float pow_2 = powf(10000.0f, fast_divide(static_cast<float>(wrap_mul(coordinate_2, 2LL)), 128.0f));
    const float where_1 = coordinate_3 ? static_cast<float>(position_ids_2) * fast_divide(1.0f, pow_2) : static_cast<float>(position_ids) * fast_divide(1.0f, pow_1);
    return k_ * round_bf16(cosf(where_1)) + (coordinate_3 ? -k__3 : k__2) * round_bf16(sinf(where_1));  // line 16: result = turned * cos + torch.cat((-b, a), -1) * sin
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* k_ptr, const i64* position_ids_ptr, bf16* out_1_ptr, i64 k_dim1, i64 q_dim0) {
    constexpr i32 LANES = 8;    // neighbours that one access moves
    constexpr i32 UNROLL = 1;   // groups of lanes in flight in a thread
    const Index element_count = k_dim1 * q_dim0 * 524288;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 k__raw[UNROLL][LANES];
    i64 position_ids_raw[UNROLL][LANES] = {};
    i64 position_ids_2_raw[UNROLL][LANES] = {};
    bf16 k__2_raw[UNROLL][LANES] = {};
    bf16 k__3_raw[UNROLL][LANES] = {};
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / k_dim1;
        const Index i1 = i2_outer - i0 * k_dim1;
        load_lanes<8>(k__raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3);
        for (i32 v = 0; v < 8; ++v) if (i3 + v >= 64) position_ids_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        for (i32 v = 0; v < 8; ++v) if (i3 + v < 64) position_ids_2_raw[u][v] = load(position_ids_ptr, i0 * 4096 + i2);
        if (i3 >= 64) load_lanes<8>(k__2_raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3 - 64);
        if (i3 < 64) load_lanes<8>(k__3_raw[u], k_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3 + 64);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / 4096;
        const Index i2 = i3_outer - i2_outer * 4096;
        const Index i0 = i2_outer / k_dim1;
        const Index i1 = i2_outer - i0 * k_dim1;
        float k_[8];
        widen_vec(k__raw[u], k_);
        i64 position_ids[8];
        widen_vec(position_ids_raw[u], position_ids);
        i64 position_ids_2[8];
        widen_vec(position_ids_2_raw[u], position_ids_2);
        float k__2[8];
        widen_vec(k__2_raw[u], k__2);
        float k__3[8];
        widen_vec(k__3_raw[u], k__3);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = rotary_position_ids_1(k_[v], position_ids[v], position_ids_2[v], k__2[v], k__3[v], i3 + v - 64, i3 + v, i3 + v < 64);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_1_ptr, i2 * 128 + i0 * k_dim1 * 524288 + i1 * 524288 + i3, result_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_rotary_position_ids_0_to_1(i64 blocks_1, const bf16* q_ptr, const i64* position_ids_ptr, bf16* out_0_ptr, const bf16* k_ptr, bf16* out_1_ptr, i64 q_dim0, i64 q_dim1, i64 k_dim1) {
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), q_ptr, position_ids_ptr, out_0_ptr, q_dim0, q_dim1);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, k_ptr, position_ids_ptr, out_1_ptr, k_dim1, q_dim0);
}
