// squared_relu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((x_dim0 * 8192 + 1023) // 1024), block 128.
// Reads x_dim0 * 16384 bytes, writes x_dim0 * 16384.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
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
__device__ __forceinline__ float squared_relu(float x) {
    return maximum(x, 0.0f) * maximum(x, 0.0f);                                       // line 7: return F.relu(x).square()
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_squared_relu(const bf16* x_ptr, bf16* out_ptr, i64 x_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = x_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 x_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(x_raw[u], x_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float x[8];
        widen_vec(x_raw[u], x);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = squared_relu(x[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, position, result_raw);
    }
}
