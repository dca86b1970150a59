// dropout: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 8, block 128.
// Reads input_dim0 * 16384 bytes, writes input_dim0 * 16384.
// input, out: bf16 [input_dim0, 8192], contiguous, 16-byte aligned.
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
// dropout in fusegen/specs/elementwise.py; its def is line 1:
//    6: return fg.dropout(input, p, training, seed=seed)

// An element is kept, times 1 / (1 - p), if its 16 random bits are at least the threshold.
__device__ __forceinline__ float dropout(float input, i64 random, i64 threshold, float keep_scale) {
    const float chosen = static_cast<i32>(random) >= static_cast<i16>(threshold) ? keep_scale : 0.0f;  // line 6
    return input * chosen;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_dropout(const bf16* input_ptr, const i64* seed_ptr, bf16* out_ptr, i64 threshold, double keep_scale) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 input_raw[LANES];
    i16 random_raw[LANES];
    load_lanes<LANES>(input_raw, input_ptr, position);
    load_lanes<LANES>(random_raw, random_bits(seed_ptr, 0), position);
    float input[LANES];
    widen_vec(input_raw, input);
    i64 random[LANES];
    widen_vec(random_raw, random);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = dropout(input[v], random[v], threshold, static_cast<float>(keep_scale));
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
