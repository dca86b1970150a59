// softplus: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((input_dim0 * 8192 + 1023) // 1024), block 128.
// Reads input_dim0 * 16384 bytes, writes input_dim0 * 16384.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_log2.cuh"
#include "../primitives/fast_log.cuh"
#include "../primitives/fast_log1p.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/round_bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float softplus_common(float beta) {
    return fast_divide(1.0f, beta);
}

__device__ __forceinline__ float softplus(float input, float beta, float threshold, float common) {
    const float mul_1 = input * beta;                                                 // line 7: return F.softplus(input, beta, threshold)
    return mul_1 > round_bf16(threshold) ? input : fast_log1p(fast_exp(mul_1)) * common;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_softplus(const bf16* input_ptr, bf16* out_ptr, i64 input_dim0, double beta, double threshold) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = input_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 input_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(input_raw[u], input_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float input[8];
        widen_vec(input_raw[u], input);
        const float common = softplus_common(beta);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = softplus(input[v], beta, threshold, common);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, position, result_raw);
    }
}
