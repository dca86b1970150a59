// elu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 8, block 128.
// Reads input_dim0 * 16384 bytes, writes input_dim0 * 16384.
// input, out: bf16 [input_dim0, 8192], contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_expm1.cuh"
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
// elu in fusegen/specs/elementwise.py; its def is line 1:
//    6: return F.elu(input, alpha)

__device__ __forceinline__ float elu(float input, float alpha) {
    return input > 0.0f ? input : fast_expm1(input) * alpha;                          // line 6
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_elu(const bf16* input_ptr, bf16* out_ptr, double alpha) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 input_raw[LANES];
    load_lanes<LANES>(input_raw, input_ptr, position);
    float input[LANES];
    widen_vec(input_raw, input);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = elu(input[v], static_cast<float>(alpha));
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
