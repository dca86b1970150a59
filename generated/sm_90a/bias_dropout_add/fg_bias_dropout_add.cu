// bias_dropout_add: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((x_dim0 * 8192 + 1023) // 1024), block 128.
// Reads x_dim0 * 32768 + 16384 bytes, writes x_dim0 * 16384.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.i16.i64.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i16.i64.bf16.cuh"
#include "../primitives/load_once.i16.i64.bf16.cuh"
#include "../primitives/widen.i16.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/load_wide.i16.i64.bf16.cuh"
#include "../primitives/random_bits.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float bias_dropout_add(float x, float bias, i64 random, float residual, i64 scalar_1, float scalar_2) {
    const bool ge_1 = static_cast<i32>(random) >= static_cast<i32>(static_cast<i64>(static_cast<i16>(scalar_1)));  // line 10: return fg.dropout(x if bias is None else x + bias, p, training, seed=se…
    return (x + bias) * (ge_1 ? scalar_2 : 0.0f) + residual;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_bias_dropout_add(const bf16* x_ptr, const bf16* bias_ptr, const i64* random_ptr, const bf16* residual_ptr, bf16* out_ptr, i64 x_dim0, i64 scalar_1, double scalar_2) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = x_dim0 * 8192;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 x_raw[UNROLL][LANES];
    bf16 bias_raw[UNROLL][LANES];
    i16 random_raw[UNROLL][LANES];
    bf16 residual_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        const Index i0 = position / 8192;
        const Index i1 = position - i0 * 8192;
        load_lanes<8>(x_raw[u], x_ptr, i0 * 8192 + i1);
        load_lanes<8>(bias_raw[u], bias_ptr, i1);
        load_lanes<8>(random_raw[u], random_bits(random_ptr, 0), i0 * 8192 + i1);
        load_lanes<8>(residual_raw[u], residual_ptr, i0 * 8192 + i1);
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
        i64 random[8];
        widen_vec(random_raw[u], random);
        float residual[8];
        widen_vec(residual_raw[u], residual);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = bias_dropout_add(x[v], bias[v], random[v], residual[v], scalar_1, scalar_2);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, i0 * 8192 + i1, result_raw);
    }
}
