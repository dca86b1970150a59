// clamped_swiglu: pointwise, 4 elements per access, emitted by fusegen for sm_90a.
// Grid ((gate_dim0 * 14336 + 511) // 512), block 128.
// Reads 0 + min(gate_dim0 * 28672, gate_dim0 * 28672) * 2 bytes, writes gate_dim0 * 28672.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.8.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/minimum.float.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.8.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float clamped_swiglu(float gate, float gate_2, float limit, float alpha, float scalar_1) {
    const float minimum_1 = minimum(gate, limit);                                     // line 21: gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return minimum_1 * fast_reciprocal(1.0f + fast_exp(-(alpha * minimum_1))) * (minimum(maximum(gate_2, scalar_1), limit) + 1.0f);  // line 22: return gate * torch.sigmoid(alpha * gate) * (up + 1)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_clamped_swiglu(const bf16* gate_ptr, bf16* out_ptr, i64 gate_dim0, double limit, double scalar_1, double alpha) {
    constexpr i32 LANES = 4;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = gate_dim0 * 14336;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 gate_in_turn_raw[UNROLL][LANES * 2];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(gate_in_turn_raw[u], gate_ptr, position * 2);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float gate_in_turn[8];
        widen_vec(gate_in_turn_raw[u], gate_in_turn);
        float gate[4], gate_2[4];
#pragma unroll
        for (i32 v = 0; v < 4; ++v) {
            gate[v] = gate_in_turn[v * 2];
            gate_2[v] = gate_in_turn[v * 2 + 1];
        }
        float result[4];
#pragma unroll
        for (i32 v = 0; v < 4; ++v) result[v] = clamped_swiglu(gate[v], gate_2[v], limit, alpha, scalar_1);
        bf16 result_raw[4];
        narrow_vec(result, result_raw);
        store_lanes<4>(out_ptr, position, result_raw);
    }
}
