// paged_attention_1: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid 131072, block 128.
// Reads (65536 + min(134217728, k_cache_dim0 * 16384) * 2) + min(134217728, k_cache_dim0 * 16384) * 2 bytes, writes 536870912.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load_once.i64.bf16.cuh"
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void paged_attention_1(float v_cache, float k_cache, float& result, float& result_2) {
    result = v_cache;
    result_2 = k_cache;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_paged_attention_1(const bf16* v_cache_ptr, const bf16* k_cache_ptr, const i64* value_11_ptr, bf16* value_18_ptr, bf16* value_14_ptr, i64 k_cache_dim0) {
    wait_for_previous();
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = 134217728;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 v_cache_raw[UNROLL][LANES];
    bf16 k_cache_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 16384;
        const Index i3 = position - i0 * 16384;
        const Index v_cache_at = wrapped_index(widen(load_once(value_11_ptr, i0)), k_cache_dim0, "fusegen: paged_attention_1: index of 'v_cache' out of range [-k_cache_dim0, k_cache_dim0)");
        const Index k_cache_at = wrapped_index(widen(load_once(value_11_ptr, i0)), k_cache_dim0, "fusegen: paged_attention_1: index of 'k_cache' out of range [-k_cache_dim0, k_cache_dim0)");
        load_lanes<8>(v_cache_raw[u], v_cache_ptr, v_cache_at * 16384 + i3);
        load_lanes<8>(k_cache_raw[u], k_cache_ptr, k_cache_at * 16384 + i3);
    }
    launch_dependents();
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 16384;
        const Index i3 = position - i0 * 16384;
        float v_cache[8];
        widen_vec(v_cache_raw[u], v_cache);
        float k_cache[8];
        widen_vec(k_cache_raw[u], k_cache);
        float result[8];
        float result_2[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) paged_attention_1(v_cache[v], k_cache[v], result[v], result_2[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(value_18_ptr, i0 * 16384 + i3, result_raw);
        bf16 result_2_raw[8];
        narrow_vec(result_2, result_2_raw);
        store_lanes<8>(value_14_ptr, i0 * 16384 + i3, result_2_raw);
    }
}
