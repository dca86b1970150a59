// reglu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid gate_dim0 * 14, block 128.
// Reads gate_dim0 * 57344 bytes, writes gate_dim0 * 28672.
// gate, up, out: bf16 [gate_dim0, 14336], contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
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
// reglu in fusegen/specs/gated.py; its def is line 1:
//    7: return F.relu(gate) * up

__device__ __forceinline__ float reglu(float gate, float up) {
    return maximum(gate, 0.0f) * up;                                                  // line 7
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_reglu(const bf16* gate_ptr, const bf16* up_ptr, bf16* out_ptr) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 gate_raw[LANES];
    bf16 up_raw[LANES];
    load_lanes<LANES>(gate_raw, gate_ptr, position);
    load_lanes<LANES>(up_raw, up_ptr, position);
    float gate[LANES];
    widen_vec(gate_raw, gate);
    float up[LANES];
    widen_vec(up_raw, up);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = reglu(gate[v], up[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
