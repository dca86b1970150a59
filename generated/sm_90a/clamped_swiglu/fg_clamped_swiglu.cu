// clamped_swiglu: pointwise, 4 elements per access, emitted by fusegen for sm_90a.
// Grid gate_dim0 * 28, block 128.
// Reads gate_dim0 * 57344 bytes, writes gate_dim0 * 28672.
// gate: bf16 [gate_dim0, 28672]; out: bf16 [gate_dim0, 14336]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/minimum.float.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.8.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// clamped_swiglu in fusegen/specs/gated.py; its def is line 1:
//   15: gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
//   16: return gate * torch.sigmoid(alpha * gate) * (up + 1)

__device__ __forceinline__ float clamped_swiglu(float gate, float gate_neighbor, float limit, float alpha,
        float minus_limit) {
    const float clamped = minimum(gate, limit);                                       // line 15
    const float product = clamped * fast_reciprocal(1.0f + fast_exp(-(alpha * clamped)));  // line 16
    return product * (minimum(maximum(gate_neighbor, minus_limit), limit) + 1.0f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 4;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_clamped_swiglu(const bf16* gate_ptr, bf16* out_ptr, double limit, double minus_limit, double alpha) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    bf16 gate_in_turn_raw[LANES * 2];
    load_lanes<8>(gate_in_turn_raw, gate_ptr, position * 2);
    float gate_in_turn[LANES * 2];
    widen_vec(gate_in_turn_raw, gate_in_turn);
    float gate[LANES], gate_neighbor[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) {
        gate[v] = gate_in_turn[v * 2];
        gate_neighbor[v] = gate_in_turn[v * 2 + 1];
    }
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) {
        result[v] = clamped_swiglu(gate[v], gate_neighbor[v], static_cast<float>(limit), static_cast<float>(alpha),
                static_cast<float>(minus_limit));
    }
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, position, result_raw);
}
