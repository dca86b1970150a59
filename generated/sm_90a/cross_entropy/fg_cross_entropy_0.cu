// cross_entropy_0: row reduction, 2 phases, rows read once, nothing of them held, emitted by fusegen for sm_90a.
// Grid 8192, block 128, 32 bytes of shared memory: one phase alone needs the elements of a row, so that nothing holds
// them.
// Reads 524288000 bytes, writes 65536.
// input: bf16 [8192, 32000]; normalizer_peak, normalizer_mass: float [8192, 1]; all contiguous, 16-byte aligned.
// A launch of its own reads normalizer_peak: row reduction.
// A launch of its own reads normalizer_mass: row reduction.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.float.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/store.float.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void normalizer_f32_identity(float& peak, float& mass) {
    peak = -infinity<float>();
    mass = 0.0f;
}

// Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867
__device__ __forceinline__ void normalizer_f32_combine(float a_peak, float a_mass, float b_peak, float b_mass,
        float& peak, float& mass) {
    const float rescale = a_peak == b_peak ? 1.0f : fast_exp(-fabsf(a_peak - b_peak));
    peak = maximum(a_peak, b_peak);
    mass = a_peak >= b_peak ? a_mass + b_mass * rescale : a_mass * rescale + b_mass;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 32000;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;  // per row
constexpr i32 WARPS = 4;  // per row
constexpr i32 BLOCKS_PER_SM = 1;  // at least, so that a thread may take most registers
constexpr i32 NORMALIZER_PEAK_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 NORMALIZER_MASS_OFFSET = 16;

// Stores a warp's partial result; after a barrier, row_normalizer_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_normalizer_f32_store_partial(float peak, float mass,
        SharedArray<float> peak_scratch, SharedArray<float> mass_scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) {
        normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    }
    if (lane_id() == 0) {
        shared_store(peak_scratch, warp_id(), peak);
        shared_store(mass_scratch, warp_id(), mass);
    }
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ void row_normalizer_f32_combine_partials(float& peak, float& mass,
        SharedArray<float> peak_scratch, SharedArray<float> mass_scratch) {
    const i32 warp = lane_id() % WARPS;
    peak = shared_load(peak_scratch, warp);
    mass = shared_load(mass_scratch, warp);
#pragma unroll
    for (i32 mask = WARPS / 2; mask > 0; mask /= 2) {
        normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_cross_entropy_0(const bf16* input_ptr, float* normalizer_peak_ptr, float* normalizer_mass_ptr) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to normalizer_peak, normalizer_mass.
    float normalizer_peak;
    float normalizer_mass;
    normalizer_f32_identity(normalizer_peak, normalizer_mass);
#pragma unroll 4
    for (Index column = thread * LANES; column < COLUMNS; column += THREADS * LANES) {
        bf16 input_raw[LANES];
        load_lanes<LANES>(input_raw, input_ptr, row * COLUMNS + column);
        float input[LANES];
        widen_vec(input_raw, input);
        float normalizer_peak_part[LANES];
        float normalizer_mass_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            normalizer_peak_part[v] = input[v];
            normalizer_mass_part[v] = 1.0f;
        }
#pragma unroll
        for (i32 half = LANES / 2; half > 0; half /= 2) {  // first within the vector
#pragma unroll
            for (i32 v = 0; v < half; ++v) {
                normalizer_f32_combine(normalizer_peak_part[v], normalizer_mass_part[v],
                        normalizer_peak_part[v + half], normalizer_mass_part[v + half], normalizer_peak_part[v],
                        normalizer_mass_part[v]);
            }
        }
        normalizer_f32_combine(normalizer_peak, normalizer_mass, normalizer_peak_part[0], normalizer_mass_part[0],
                normalizer_peak, normalizer_mass);
    }
    row_normalizer_f32_store_partial(normalizer_peak, normalizer_mass, shared_array<float>(NORMALIZER_PEAK_OFFSET),
            shared_array<float>(NORMALIZER_MASS_OFFSET));
    block_sync();
    row_normalizer_f32_combine_partials(normalizer_peak, normalizer_mass, shared_array<float>(NORMALIZER_PEAK_OFFSET),
            shared_array<float>(NORMALIZER_MASS_OFFSET));

    // Phase 2 of 2: writes normalizer_mass, normalizer_peak.
    if (thread == 0) {
        store_narrowed(normalizer_mass_ptr, row, normalizer_mass);
        store_narrowed(normalizer_peak_ptr, row, normalizer_peak);
    }
}
