// gelu_new: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid x_dim0 * x_dim1 * 3, block 128.
// Reads x_dim0 * x_dim1 * 6144 bytes, writes x_dim0 * x_dim1 * 6144.
// x, out: bf16 [x_dim0, x_dim1, 3072], contiguous, 16-byte aligned.
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
// gelu_new in fusegen/specs/elementwise.py; its def is line 1:
//    6: return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

// 1 + tanh(u) as 2 sigmoid(2u).
__device__ __forceinline__ float gelu_new(float x) {
    const float product = 1.5957692f * (x + 0.044715f * (x * x * x));                 // line 6
    return x * fast_reciprocal(1.0f + fast_exp(-product));
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_gelu_new(const bf16* x_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 x_raw[LANES];
    load_lanes<LANES>(x_raw, x_ptr, position);
    float x[LANES];
    widen_vec(x_raw, x);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = gelu_new(x[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
