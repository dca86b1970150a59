// logsumexp: row reduction, 2 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid input_dim0, block 128, 128 bytes of shared memory: a row fits the registers of 128 threads, 32 elements each.
// Reads input_dim0 * 8192 bytes, writes input_dim0 * 2.
#include "../primitives/types.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store.bf16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void normalizer_f32_identity(float& peak, float& mass) {
    peak = -bit_cast<float>(0x7f800000u);
    mass = 0.0f;
}

__device__ __forceinline__ void normalizer_f32_combine(float a_peak, float a_mass, float b_peak, float b_mass, float& peak, float& mass) {
    const float where_1 = a_peak == b_peak ? 1.0f : fast_exp(-fabsf(a_peak - b_peak));
    peak = maximum(a_peak, b_peak);
    mass = a_peak >= b_peak ? a_mass + b_mass * where_1 : a_mass * where_1 + b_mass;
}

__device__ __forceinline__ float logsumexp_0() {
    return 1.0f;
}

__device__ __forceinline__ float logsumexp_row_1(float normalizer_peak, float normalizer_mass) {
    return normalizer_peak + logf(normalizer_mass);                                   // line 7: return torch.logsumexp(input, dim, keepdim)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 128;  // that share a row
constexpr i32 MEETING = 4;  // lanes that take a warp's part each: a power of two
constexpr i32 CHUNKS = 4;  // groups of lanes that a thread holds

// Leaves a warp's part of what the threads of a row combine; row_normalizer_f32_meet takes all parts, behind a barrier.
template <typename Scratch0, typename Scratch1>
__device__ __forceinline__ void row_normalizer_f32_leave(float peak, float mass, Scratch0 peak_scratch, Scratch1 mass_scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    if (lane_id() == 0) {
        shared_store(peak_scratch, warp_id(), peak);
        shared_store(mass_scratch, warp_id(), mass);
    }
}

// Combines the parts of all warps; every thread receives that of lane 0, since two lanes may round in another order.
template <typename Scratch0, typename Scratch1>
__device__ __forceinline__ void row_normalizer_f32_meet(float& peak, float& mass, Scratch0 peak_scratch, Scratch1 mass_scratch) {
    const i32 warp = lane_id() % MEETING;
    peak = shared_load(peak_scratch, warp);
    mass = shared_load(mass_scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    peak = shuffle_xor(peak, lane_id());
    mass = shuffle_xor(mass, lane_id());
}

extern "C" __global__ void __launch_bounds__(128, 8)
fg_logsumexp(const bf16* input_ptr, bf16* out_ptr, i64 input_dim0) {
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 2: reduces each row to normalizer_peak, normalizer_mass.
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(input_raw[c], input_ptr, row * 4096 + column);
    }
    float normalizer_peak; float normalizer_mass; normalizer_f32_identity(normalizer_peak, normalizer_mass);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float input[LANES];
        widen_vec(input_raw[c], input);
        float normalizer_mass_part[LANES];
        float normalizer_peak_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            normalizer_mass_part[v] = logsumexp_0();
            normalizer_peak_part[v] = input[v];
        }
#pragma unroll
        for (i32 half = LANES / 2; half > 0; half /= 2) {  // the lanes among themselves first
#pragma unroll
            for (i32 v = 0; v < half; ++v) normalizer_f32_combine(normalizer_peak_part[v], normalizer_mass_part[v], normalizer_peak_part[v + half], normalizer_mass_part[v + half], normalizer_peak_part[v], normalizer_mass_part[v]);
        }
        normalizer_f32_combine(normalizer_peak, normalizer_mass, normalizer_peak_part[0], normalizer_mass_part[0], normalizer_peak, normalizer_mass);
    }
    row_normalizer_f32_leave(normalizer_peak, normalizer_mass, shared_array<float>(0), shared_array<float>(64));
    block_sync();
    row_normalizer_f32_meet(normalizer_peak, normalizer_mass, shared_array<float>(0), shared_array<float>(64));

    // Phase 2 of 2: computes row_value; writes out.
    const float row_value = logsumexp_row_1(normalizer_peak, normalizer_mass);
    if (thread == 0) {
        bf16 narrowed;
        narrow(row_value, narrowed);
        store(out_ptr, row, narrowed);
    }
}
