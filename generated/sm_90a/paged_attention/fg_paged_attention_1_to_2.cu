// paged_attention_1: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid 131072, block 128.
// Reads 65536 + min(134217728, k_cache_dim0 * 16384) * 2 bytes, writes 268435456.
// paged_attention_2: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid 131072, block 128.
// Reads 65664 + min(134217728, k_cache_dim0 * 16384) * 2 bytes, writes 268435456.
#include "../primitives/types.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.bf16.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/load_once.i64.bf16.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
#include "../primitives/wrapped_index.cuh"

namespace part_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float paged_attention_1(float k_cache) {
    return k_cache;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const bf16* k_cache_ptr, const i64* value_11_ptr, bf16* value_14_ptr, i64 k_cache_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = 134217728;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    bf16 k_cache_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 16384;
        const Index i3 = position - i0 * 16384;
        const Index k_cache_at = wrapped_index(widen(load_once(value_11_ptr, i0)), k_cache_dim0, "fusegen: paged_attention_1: index of 'k_cache' out of range [-k_cache_dim0, k_cache_dim0)");
        load_lanes<8>(k_cache_raw[u], k_cache_ptr, k_cache_at * 16384 + i3);
    }
    launch_dependents();
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 16384;
        const Index i3 = position - i0 * 16384;
        float k_cache[8];
        widen_vec(k_cache_raw[u], k_cache);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = paged_attention_1(k_cache[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(value_14_ptr, i0 * 16384 + i3, result_raw);
    }
}
}  // part_1

namespace part_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float paged_attention_2(i64 lengths, float v_cache, i64 coordinate) {
    return coordinate < minimum(maximum(lengths, 0LL), 8192LL) ? v_cache : 0.0f;      // line 22: v = torch.where(torch.arange(v.shape[-2], device=v.device)[:, None] < l…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

__device__ __forceinline__ void run(i32 block, i32 blocks, const i64* lengths_ptr, const bf16* v_cache_ptr, const i64* value_11_ptr, bf16* value_30_ptr, i64 k_cache_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = 134217728;
    const Index first = (static_cast<Index>(block) * UNROLL * 128 + thread_id()) * LANES;

    i64 lengths_raw[UNROLL];
    bf16 v_cache_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_within_outer = i3_outer / 16;
        const Index i2_within = i3_outer - i2_within_outer * 16;
        const Index i2_part_outer = i2_within_outer / 512;
        const Index i2_part = i2_within_outer - i2_part_outer * 512;
        const Index i0 = i2_part_outer / 8;
        const Index i1 = i2_part_outer - i0 * 8;
        const Index v_cache_at = wrapped_index(widen(load_once(value_11_ptr, i0 * 512 + i2_part)), k_cache_dim0, "fusegen: paged_attention_2: index of 'v_cache' out of range [-k_cache_dim0, k_cache_dim0)");
        lengths_raw[u] = load(lengths_ptr, i0);
        load_lanes<8>(v_cache_raw[u], v_cache_ptr, i2_within * 1024 + i1 * 128 + v_cache_at * 16384 + i3);
    }
    launch_dependents();
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_within_outer = i3_outer / 16;
        const Index i2_within = i3_outer - i2_within_outer * 16;
        const Index i2_part_outer = i2_within_outer / 512;
        const Index i2_part = i2_within_outer - i2_part_outer * 512;
        const Index i0 = i2_part_outer / 8;
        const Index i1 = i2_part_outer - i0 * 8;
        const i64 lengths = widen(lengths_raw[u]);
        float v_cache[8];
        widen_vec(v_cache_raw[u], v_cache);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = paged_attention_2(lengths, v_cache[v], i2_part * 16 + i2_within);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(value_30_ptr, i1 * 1048576 + i2_within * 128 + i2_part * 2048 + i0 * 8388608 + i3, result_raw);
    }
}
}  // part_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(128, 1)
fg_paged_attention_1_to_2(i64 blocks_1, const bf16* k_cache_ptr, const i64* value_11_ptr, bf16* value_14_ptr, const i64* lengths_ptr, const bf16* v_cache_ptr, bf16* value_30_ptr, i64 k_cache_dim0) {
    wait_for_previous();
    i32 block = block_id(), blocks = block_count();
    if (block < blocks_1) return part_1::run(block, static_cast<i32>(blocks_1), k_cache_ptr, value_11_ptr, value_14_ptr, k_cache_dim0);
    block -= static_cast<i32>(blocks_1);
    blocks -= static_cast<i32>(blocks_1);
    part_2::run(block, blocks, lengths_ptr, v_cache_ptr, value_11_ptr, value_30_ptr, k_cache_dim0);
}
