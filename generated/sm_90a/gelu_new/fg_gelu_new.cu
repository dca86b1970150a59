// gelu_new: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((x_dim0 * x_dim1 * 3072 + 1023) // 1024), block 128.
// Reads x_dim0 * x_dim1 * 6144 bytes, writes x_dim0 * x_dim1 * 6144.
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
__device__ __forceinline__ float gelu_new(float x) {
    const float sigmoid_1 = fast_reciprocal(1.0f + fast_exp(-(2.0f * (0.7978845608028654f * (x + 0.044715f * (x * x * x))))));  // line 9: return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.04…
    return x * sigmoid_1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_gelu_new(const bf16* x_ptr, bf16* out_ptr, i64 x_dim0, i64 x_dim1) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = x_dim0 * x_dim1 * 3072;
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
        for (i32 v = 0; v < 8; ++v) result[v] = gelu_new(x[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, position, result_raw);
    }
}
