// bias_gelu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((x_dim0 * 8192 + 1023) // 1024), block 128.
// Reads x_dim0 * 16384 + 16384 bytes, writes x_dim0 * 16384.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
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
__device__ __forceinline__ float bias_gelu(float x, float bias) {
    const float add_1 = x + bias;                                                     // line 10: return gelu_of(x + bias, approximate)
    const float sigmoid_1 = fast_reciprocal(1.0f + fast_exp(-(add_1 * (1.5957691216057308f + 0.07135481627260025f * (add_1 * add_1)))));  // line 7: return F.gelu(x, approximate=approximate)
    return add_1 * sigmoid_1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_bias_gelu(const bf16* x_ptr, const bf16* bias_ptr, bf16* out_ptr, i64 x_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = x_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 x_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 8192;
        const Index i1 = position - i0 * 8192;
        load_lanes<8>(x_raw[u], x_ptr, i0 * 8192 + i1);
        load_lanes<8>(bias_raw[u], bias_ptr, i1);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 8192;
        const Index i1 = position - i0 * 8192;
        float x[8];
        widen_vec(x_raw[u], x);
        float bias[8];
        widen_vec(bias_raw[u], bias);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_gelu(x[v], bias[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, i0 * 8192 + i1, result_raw);
    }
}
