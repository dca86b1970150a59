// add: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((a_dim0 * 8192 + 1023) // 1024), block 128.
// Reads a_dim0 * 32768 bytes, writes a_dim0 * 16384.
#include "../primitives/types.cuh"
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float add(float a, float b) {
    return a + b;                                                                     // line 7: total = a + b
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_add(const bf16* a_ptr, const bf16* b_ptr, bf16* out_ptr, i64 a_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = a_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 a_raw[UNROLL][LANES];
    bf16 b_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(a_raw[u], a_ptr, position);
        load_lanes<8>(b_raw[u], b_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float a[8];
        widen_vec(a_raw[u], a);
        float b[8];
        widen_vec(b_raw[u], b);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = add(a[v], b[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, position, result_raw);
    }
}
