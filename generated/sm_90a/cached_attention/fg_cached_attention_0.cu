// cached_attention_0: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((k_cache_dim2 * 16384 + 1023) // 1024), block 128.
// Reads k_cache_dim2 * 32768 + 128 bytes, writes k_cache_dim2 * 32768.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.bf16.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float cached_attention_0(i64 lengths, float v_cache, i64 coordinate, i64 coordinate_2) {
    return coordinate < minimum(maximum(lengths, 0LL), coordinate_2) ? v_cache : 0.0f;  // line 22: v = torch.where(torch.arange(v.shape[-2], device=v.device)[:, None] < l…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_cached_attention_0(const i64* lengths_ptr, const bf16* v_cache_ptr, bf16* value_13_ptr, i64 k_cache_dim2) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = k_cache_dim2 * 16384;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    i64 lengths_raw[UNROLL];
    bf16 v_cache_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / static_cast<Index>(k_cache_dim2);
        const Index i2 = i3_outer - i2_outer * static_cast<Index>(k_cache_dim2);
        const Index i0 = i2_outer / 8;
        const Index i1 = i2_outer - i0 * 8;
        lengths_raw[u] = load(lengths_ptr, i0);
        load_lanes<8>(v_cache_raw[u], v_cache_ptr, i0 * k_cache_dim2 * 1024 + i1 * k_cache_dim2 * 128 + i2 * 128 + i3);
    }
    launch_dependents();
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / static_cast<Index>(k_cache_dim2);
        const Index i2 = i3_outer - i2_outer * static_cast<Index>(k_cache_dim2);
        const Index i0 = i2_outer / 8;
        const Index i1 = i2_outer - i0 * 8;
        const i64 lengths = widen(lengths_raw[u]);
        float v_cache[8];
        widen_vec(v_cache_raw[u], v_cache);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = cached_attention_0(lengths, v_cache[v], i2, k_cache_dim2);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(value_13_ptr, i0 * k_cache_dim2 * 1024 + i1 * k_cache_dim2 * 128 + i2 * 128 + i3, result_raw);
    }
}
