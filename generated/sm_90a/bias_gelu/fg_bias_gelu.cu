// bias_gelu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid x_dim0 * 8, block 128.
// Reads x_dim0 * 16384 + 16384 bytes, writes x_dim0 * 16384.
// x, out: bf16 [x_dim0, 8192]; bias: bf16 [8192]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
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
// bias_gelu in fusegen/specs/elementwise.py; its def is line 1:
//    7: return gelu_of(x + bias, approximate)
// gelu_of in fusegen/specs/elementwise.py; its def is line 1:
//    8: return F.gelu(x, approximate=approximate)

// gelu in its tanh form, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2u).
__device__ __forceinline__ float bias_gelu(float x, float bias) {
    const float sum = x + bias;                                                       // bias_gelu, line 7
    const float product = sum * (1.5957692f + 0.071354814f * (sum * sum));            // gelu_of, line 8
    return sum * fast_reciprocal(1.0f + fast_exp(-product));
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_bias_gelu(const bf16* x_ptr, const bf16* bias_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 8192;
    const Index i1 = position - i0 * 8192;
    bf16 x_raw[LANES];
    bf16 bias_raw[LANES];
    load_lanes<LANES>(x_raw, x_ptr, position);
    load_lanes<LANES>(bias_raw, bias_ptr, i1);
    float x[LANES];
    widen_vec(x_raw, x);
    float bias[LANES];
    widen_vec(bias_raw, bias);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = bias_gelu(x[v], bias[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
