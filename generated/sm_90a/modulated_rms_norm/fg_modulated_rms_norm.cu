// modulated_rms_norm: row reduction, 2 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid x_dim0 * 4096, block 192, 32 bytes of shared memory: a row fits the registers of 192 threads, 24 elements per
// thread.
// Reads x_dim0 * 33570816 bytes, writes x_dim0 * 33554432.
// x, out: bf16 [x_dim0, 4096, 4096]; scale, shift: bf16 [x_dim0, 4096]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rms_normalized in fusegen/specs/normalization.py; its def is line 1:
//   20: return F.rms_norm(x, (x.shape[-1],), weight, eps)
// modulated in fusegen/specs/normalization.py; its def is line 1:
//    9: return scaled if shift is None else scaled + shift

__device__ __forceinline__ float square(float x) {
    return x * x;                                                                     // rms_normalized, line 20
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * (1.0f / 4096.0f) + eps);                              // rms_normalized, line 20
}

__device__ __forceinline__ float normalized(float x, float rstd, float scale, float shift) {
    return x * rstd * (1.0f + scale) + shift;                                         // modulated, line 9
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 4096;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 192;  // per row
constexpr i32 WARPS = 6;  // per row
constexpr i32 COMBINING_LANES = 8;  // at least one per warp: a power of two
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 3;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS
constexpr i32 BLOCKS_PER_SM = 5;  // at least, which limits the registers of a thread
constexpr i32 SQUARES_OFFSET = 0;  // in shared memory, in bytes

// Stores a warp's partial result; after a barrier, row_sum_f32_combine_partials combines those of all warps.
__device__ __forceinline__ void row_sum_f32_store_partial(float value, SharedArray<float> scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
__device__ __forceinline__ float row_sum_f32_combine_partials(SharedArray<float> scratch) {
    const i32 warp = lane_id() % COMBINING_LANES;
    float value = 0.0f;
    if (warp < WARPS) value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = COMBINING_LANES / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_modulated_rms_norm(const bf16* x_ptr, const bf16* scale_ptr, const bf16* shift_ptr, bf16* out_ptr, double eps) {
    const Index row = static_cast<Index>(block_id());
    const i32 thread = thread_id();
    const Index i0 = row / 4096;

    // Phase 1 of 2: reduces the row to squares.
    bf16 x_raw[CHUNKS][LANES];
    bf16 scale_raw[CHUNKS][LANES];
    bf16 shift_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        load_lanes<LANES>(x_raw[c], x_ptr, row * COLUMNS + column);
        load_lanes<LANES>(scale_raw[c], scale_ptr, i0 * 4096 + column);
        load_lanes<LANES>(shift_raw[c], shift_ptr, i0 * 4096 + column);
    }
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        float x[LANES];
        widen_vec(x_raw[c], x);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float squares_part = square(x[v]);
            squares_of[v % PARTIALS] += squares_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] += squares_of[k + half];
    }
    row_sum_f32_store_partial(squares_of[0], shared_array<float>(SQUARES_OFFSET));
    block_sync();
    const float squares = row_sum_f32_combine_partials(shared_array<float>(SQUARES_OFFSET));

    // Phase 2 of 2: computes rstd; writes out.
    const float rstd = rstd_of(squares, static_cast<float>(eps));
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= COLUMNS) continue;
        float x[LANES];
        widen_vec(x_raw[c], x);
        float scale[LANES];
        widen_vec(scale_raw[c], scale);
        float shift[LANES];
        widen_vec(shift_raw[c], shift);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = normalized(x[v], rstd, scale[v], shift[v]);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(out_ptr, row * COLUMNS + column, result_raw);
    }
}
