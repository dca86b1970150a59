// geglu: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid ((gate_dim0 * 14336 + 1023) // 1024), block 128.
// Reads gate_dim0 * 57344 bytes, writes gate_dim0 * 28672.
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
__device__ __forceinline__ float geglu(float gate, float up) {
    const float sigmoid_1 = fast_reciprocal(1.0f + fast_exp(-(gate * (1.5957691216057308f + 0.07135481627260025f * (gate * gate)))));  // line 7: return F.gelu(x, approximate=approximate)
    return gate * sigmoid_1 * up;                                                     // line 13: return gelu_of(gate, approximate) * up
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

extern "C" __global__ void __launch_bounds__(128)
fg_geglu(const bf16* gate_ptr, const bf16* up_ptr, bf16* out_ptr, i64 gate_dim0) {
    constexpr i32 LANES = 8;    // vector width
    constexpr i32 UNROLL = 1;   // vectors per thread in flight
    const Index element_count = gate_dim0 * 14336;
    const Index first = (static_cast<Index>(block_id()) * UNROLL * 128 + thread_id()) * LANES;

    bf16 gate_raw[UNROLL][LANES];
    bf16 up_raw[UNROLL][LANES];
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        load_lanes<8>(gate_raw[u], gate_ptr, position);
        load_lanes<8>(up_raw[u], up_ptr, position);
    }
#pragma unroll
    for (i32 u = 0; u < UNROLL; ++u) {
        const Index position = first + static_cast<Index>(u) * 128 * LANES;
        if (position + LANES > element_count) continue;
        float gate[8];
        widen_vec(gate_raw[u], gate);
        float up[8];
        widen_vec(up_raw[u], up);
        float result[8];
#pragma unroll
        for (i32 v = 0; v < 8; ++v) result[v] = geglu(gate[v], up[v]);
        bf16 result_raw[8];
        narrow_vec(result, result_raw);
        store_lanes<8>(out_ptr, position, result_raw);
    }
}
