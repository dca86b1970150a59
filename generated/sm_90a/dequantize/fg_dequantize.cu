// dequantize: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 4, block 128.
// Reads input_dim0 * 4100 bytes, writes input_dim0 * 8192.
// input: f8e4m3 [input_dim0, 4096]; scale: float [input_dim0, 1]; out: bf16 [input_dim0, 4096]; all contiguous, 16-byte
// aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.f8e4m3.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.float.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.8.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen_e4m3x2.cuh"
#include "../primitives/widen.f8e4m3.float.cuh"
#include "../primitives/widen_vec.f8e4m3.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// dequantize in fusegen/specs/quantization.py; its def is line 1:
//   13: return (wide * aligned(scale, input, granularity, group_size)).to(dtype).reshape(input.shape)

__device__ __forceinline__ float dequantize(float input, float scale) {
    return input * scale;                                                             // line 13
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_dequantize(const f8e4m3* input_ptr, const float* scale_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 4096;
    f8e4m3 input_raw[LANES];
    load_lanes<LANES>(input_raw, input_ptr, position);
    const float scale_raw = load(scale_ptr, i0);
    float input[LANES];
    widen_vec(input_raw, input);
    const float scale = widen(scale_raw);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = dequantize(input[v], scale);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
