// paged_attention_0: pointwise, 2 elements per access, emitted by fusegen for sm_90a.
// Grid 32, block 128.
// Reads 65664 bytes, writes 65536.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.i64.cuh"
#include "../primitives/narrow_vec.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.cuh"
#include "../primitives/widen_vec.cuh"
#include "../primitives/wrap_mul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ i64 paged_attention_0(i64 lengths, i64 page_table, i64 coordinate) {
    return wrap_mul(coordinate, 16LL) < lengths ? page_table : 0LL;                   // line 40: used = torch.where(first < lengths[:, None], page_table, 0)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_paged_attention_0(const i64* lengths_ptr, const i64* page_table_ptr, i64* value_11_ptr) {
    constexpr i32 LANES = 2;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    i64 lengths_raw[UNROLL];
    i64 page_table_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 512;
        const Index i1 = position - i0 * 512;
        lengths_raw[u] = load(lengths_ptr, i0);
        load_lanes<2>(page_table_raw[u], page_table_ptr, i0 * 512 + i1);
    }
    launch_dependents();
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 512;
        const Index i1 = position - i0 * 512;
        const i64 lengths = widen(lengths_raw[u]);
        i64 page_table[2];
        widen_vec(page_table_raw[u], page_table);
        i64 result[2];
#pragma unroll
        for (i32 v = 0; v < 2; ++v) result[v] = paged_attention_0(lengths, page_table[v], i1 + v);
        i64 result_raw[2];
        narrow_vec(result, result_raw);
        store_lanes<2>(value_11_ptr, i0 * 512 + i1, result_raw);
    }
}
