// bias_dropout_add: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid x_dim0 * 8, block 128.
// Reads x_dim0 * 32768 + 16384 bytes, writes x_dim0 * 16384.
// x, residual, out: bf16 [x_dim0, 8192]; bias: bf16 [8192]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
#include "../primitives/random_bits.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i16.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// bias_dropout_add in fusegen/specs/elementwise.py; its def is line 1:
//    9: return fg.dropout(x if bias is None else x + bias, p, training, seed=seed) + residual

// An element is kept, times 1 / (1 - p), if its 16 random bits are at least the threshold.
__device__ __forceinline__ float bias_dropout_add(float x, float bias, i64 random, float residual, i64 threshold,
        float keep_scale) {
    const float chosen = static_cast<i32>(random) >= static_cast<i16>(threshold) ? keep_scale : 0.0f;  // line 9
    return (x + bias) * chosen + residual;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_bias_dropout_add(const bf16* x_ptr, const bf16* bias_ptr, const i64* seed_ptr, const bf16* residual_ptr,
        bf16* out_ptr, i64 threshold, double keep_scale) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 8192;
    const Index i1 = position - i0 * 8192;
    bf16 x_raw[LANES];
    bf16 bias_raw[LANES];
    i16 random_raw[LANES];
    bf16 residual_raw[LANES];
    load_lanes<LANES>(x_raw, x_ptr, position);
    load_lanes<LANES>(bias_raw, bias_ptr, i1);
    load_lanes<LANES>(random_raw, random_bits(seed_ptr, 0), position);
    load_lanes<LANES>(residual_raw, residual_ptr, position);
    float x[LANES];
    widen_vec(x_raw, x);
    float bias[LANES];
    widen_vec(bias_raw, bias);
    i64 random[LANES];
    widen_vec(random_raw, random);
    float residual[LANES];
    widen_vec(residual_raw, residual);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) {
        result[v] = bias_dropout_add(x[v], bias[v], random[v], residual[v], threshold, static_cast<float>(keep_scale));
    }
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
