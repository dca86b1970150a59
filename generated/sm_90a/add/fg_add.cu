// add: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid a_dim0 * 8, block 128.
// Reads a_dim0 * 32768 bytes, writes a_dim0 * 16384.
// a, b, out: bf16 [a_dim0, 8192], contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
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
// add in fusegen/specs/elementwise.py; its def is line 1:
//    6: total = a + b

__device__ __forceinline__ float add(float a, float b) {
    return a + b;                                                                     // line 6
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_add(const bf16* a_ptr, const bf16* b_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 a_raw[LANES];
    bf16 b_raw[LANES];
    load_lanes<LANES>(a_raw, a_ptr, position);
    load_lanes<LANES>(b_raw, b_ptr, position);
    float a[LANES];
    widen_vec(a_raw, a);
    float b[LANES];
    widen_vec(b_raw, b);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = add(a[v], b[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
