// gated_activation_quant: row reduction, 2 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid gate_dim0, block 512, 64 bytes of shared memory: a row fits the registers of 512 threads, 32 elements per
// thread.
// Reads gate_dim0 * 57344 bytes, writes gate_dim0 * 14340.
// gate, up: bf16 [gate_dim0, 14336]; values: f8e4m3 [gate_dim0, 14336]; scale: float [gate_dim0, 1]; all contiguous,
// 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.f8e4m3.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/minimum.float.cuh"
#include "../primitives/narrow.f8e4m3.float.cuh"
#include "../primitives/narrow_vec.f8e4m3.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.8.cuh"
#include "../primitives/store_lanes.cuh"
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
// gated_activation_quant in fusegen/specs/quantization.py; its def is line 1:
//   18: return of_one(quantized(activate(gate, activation) * up, granularity, quant_dtype, scale, group_size,
//       scale_ue8m0))
// quantized in fusegen/specs/quantization.py; its def is line 1:
//   33: scale = wide.abs().amax(dims, keepdim=granularity != "per_tensor").clamp(min=EPS) * (1.0 / largest)
// narrowed in fusegen/specs/quantization.py; its def is line 1:
//    8: inverse_scale = 1.0 / scale.float()
//    9: values = (x.float() * inverse_scale).clamp(-largest, largest)

__device__ __forceinline__ float amax_f32_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ void magnitude_and_product_of(float gate, float up, float& amax_part, float& product) {
    product = gate * fast_reciprocal(1.0f + fast_exp(-gate)) * up;                    // gated_activation_quant, line 18
    amax_part = fabsf(product);                                                       // quantized, line 33
}

__device__ __forceinline__ void scale_and_inverse_scale_of(float amax, float& scale, float& inverse_scale) {
    scale = maximum(amax, 1e-10f) * (1.0f / 448.0f);                                  // quantized, line 33
    inverse_scale = fast_divide(1.0f, scale);                                         // narrowed, line 8
}

__device__ __forceinline__ float result_of(float product, float inverse_scale) {
    return minimum(maximum(product * inverse_scale, -448.0f), 448.0f);                // narrowed, line 9
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 14336;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 512;  // per row
constexpr i32 WARPS = 16;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 4;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS
constexpr i32 BLOCKS_PER_SM = 2;  // at least, which limits the registers of a thread
constexpr i32 AMAX_OFFSET = 0;  // in shared memory, in bytes

// Stores a warp's partial result; after a barrier, row_amax_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_amax_f32_store_partial(float value, SharedArray<float> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ float row_amax_f32_combine_partials(SharedArray<float> scratch) {
    const i32 warp = lane_id() % WARPS;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = WARPS / 2; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_gated_activation_quant(const bf16* gate_ptr, const bf16* up_ptr, f8e4m3* values_ptr, float* scale_ptr) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();

    // Phase 1 of 2: reduces the row to amax; stores product for later phases.
    bf16 gate_raw[CHUNKS][LANES];
    bf16 up_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        load_lanes<LANES>(gate_raw[c], gate_ptr, row * COLUMNS + column);
        load_lanes<LANES>(up_raw[c], up_ptr, row * COLUMNS + column);
    }
    float product_kept[CHUNKS][LANES];
    float amax_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) amax_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        float gate[LANES];
        widen_vec(gate_raw[c], gate);
        float up[LANES];
        widen_vec(up_raw[c], up);
        float product[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            float amax_part;
            magnitude_and_product_of(gate[v], up[v], amax_part, product[v]);
            amax_of[v % PARTIALS] = amax_f32_combine(amax_of[v % PARTIALS], amax_part);
            product_kept[c][v] = product[v];
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) amax_of[k] = amax_f32_combine(amax_of[k], amax_of[k + half]);
    }
    row_amax_f32_store_partial(amax_of[0], shared_array<float>(AMAX_OFFSET));
    block_sync();
    const float amax = row_amax_f32_combine_partials(shared_array<float>(AMAX_OFFSET));

    // Phase 2 of 2: computes scale, inverse_scale; writes values, scale.
    float scale;
    float inverse_scale;
    scale_and_inverse_scale_of(amax, scale, inverse_scale);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        const float (&product)[LANES] = product_kept[c];
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = result_of(product[v], inverse_scale);
        }
        f8e4m3 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(values_ptr, row * COLUMNS + column, result_raw);
    }
    if (thread == 0) {
        store_narrowed(scale_ptr, row, scale);
    }
}
