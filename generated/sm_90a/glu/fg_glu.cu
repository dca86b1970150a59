// glu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 14, block 128.
// Reads input_dim0 * 57344 bytes, writes input_dim0 * 28672.
// input: bf16 [input_dim0, 28672]; out: bf16 [input_dim0, 14336]; all contiguous, 16-byte aligned.
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
// glu in fusegen/specs/gated.py; its def is line 1:
//    7: return F.glu(input, dim)

__device__ __forceinline__ float glu(float input, float input_other) {
    return input * fast_reciprocal(1.0f + fast_exp(-input_other));                    // line 7
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_glu(const bf16* input_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 14336;
    const Index i1 = position - i0 * 14336;
    const Index input_offset = i0 * 28672 + i1;
    bf16 input_raw[LANES];
    bf16 input_other_raw[LANES];
    load_lanes<LANES>(input_raw, input_ptr, input_offset);
    load_lanes<LANES>(input_other_raw, input_ptr, input_offset + 14336);
    float input[LANES];
    widen_vec(input_raw, input);
    float input_other[LANES];
    widen_vec(input_other_raw, input_other);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = glu(input[v], input_other[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
