// qk_norm_0_to_1: 2 kernels in one launch, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * q_dim2 + 63) / 64) + ((k_dim1 * q_dim0 * q_dim2 + 31) / 32), block 256. The blocks of each
// part follow those of the previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// qk_norm_0: row reduction, 2 phases, rows read once into registers.
// Blocks: (q_dim0 * q_dim1 * q_dim2 + 63) / 64; a row fits the registers of 4 threads, 32 elements per thread.
// Reads q_dim0 * q_dim1 * q_dim2 * 256 + 256 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// q, queries: bf16 [q_dim0, q_dim1, q_dim2, 128]; q_weight: bf16 [128]; all contiguous, 16-byte aligned.
// qk_norm_1: row reduction, 2 phases, rows read once into registers.
// Blocks: (k_dim1 * q_dim0 * q_dim2 + 31) / 32; a row fits the registers of 8 threads, 16 elements per thread.
// Reads k_dim1 * q_dim0 * q_dim2 * 256 + 256 bytes, writes k_dim1 * q_dim0 * q_dim2 * 256.
// k, keys: bf16 [q_dim0, k_dim1, q_dim2, 128]; k_weight: bf16 [128]; all contiguous, 16-byte aligned.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_rsqrt.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

namespace qk_norm_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rms_normalized in fusegen/specs/normalization.py; its def is line 1:
//   20: return F.rms_norm(x, (x.shape[-1],), weight, eps)

__device__ __forceinline__ float square(float q) {
    return q * q;                                                                     // line 20
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * 0.0078125f + eps);                                    // line 20
}

__device__ __forceinline__ float normalized(float q, float rstd, float q_weight) {
    return q * rstd * q_weight;                                                       // line 20
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 128;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 4;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 ROWS = 64;  // per block at a time
constexpr i32 CHUNKS = 4;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ float row_sum_f32(float value) {
#pragma unroll
    for (i32 mask = THREADS / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

__device__ __forceinline__ void run(i32 block, const bf16* q_ptr, const bf16* q_weight_ptr, bf16* queries_ptr,
        i64 q_dim0_extent, i64 q_dim1_extent, i64 q_dim2_extent, double eps) {
    const Index q_dim0 = static_cast<Index>(q_dim0_extent);
    const Index q_dim1 = static_cast<Index>(q_dim1_extent);
    const Index q_dim2 = static_cast<Index>(q_dim2_extent);
    const Index row_count = q_dim0 * q_dim1 * q_dim2;
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? COLUMNS : 0;

    // Phase 1 of 2: reduces the row to squares.
    bf16 q_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<LANES>(q_raw[c], q_ptr, row * COLUMNS + column);
    }
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float q[LANES];
        widen_vec(q_raw[c], q);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float squares_part = square(q[v]);
            squares_of[v % PARTIALS] += squares_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] += squares_of[k + half];
    }
    const float squares = row_sum_f32(squares_of[0]);

    // Phase 2 of 2: computes rstd; writes queries.
    const float rstd = rstd_of(squares, static_cast<float>(eps));
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        bf16 q_weight_raw[LANES];
        load_lanes<LANES>(q_weight_raw, q_weight_ptr, column);
        float q_weight[LANES];
        widen_vec(q_weight_raw, q_weight);
        float q[LANES];
        widen_vec(q_raw[c], q);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = normalized(q[v], rstd, q_weight[v]);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(queries_ptr, row * COLUMNS + column, result_raw);
    }
}
}  // namespace qk_norm_0

namespace qk_norm_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rms_normalized in fusegen/specs/normalization.py; its def is line 1:
//   20: return F.rms_norm(x, (x.shape[-1],), weight, eps)

__device__ __forceinline__ float square(float k_val) {
    return k_val * k_val;                                                             // line 20
}

__device__ __forceinline__ float rstd_of(float squares, float eps) {
    return fast_rsqrt(squares * 0.0078125f + eps);                                    // line 20
}

__device__ __forceinline__ float normalized(float k_val, float rstd, float k_weight) {
    return k_val * rstd * k_weight;                                                   // line 20
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 128;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 8;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 ROWS = 32;  // per block at a time
constexpr i32 CHUNKS = 2;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ float row_sum_f32(float value) {
#pragma unroll
    for (i32 mask = THREADS / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

__device__ __forceinline__ void run(i32 block, const bf16* k_ptr, const bf16* k_weight_ptr, bf16* keys_ptr,
        i64 k_dim1_extent, i64 q_dim0_extent, i64 q_dim2_extent, double eps) {
    const Index k_dim1 = static_cast<Index>(k_dim1_extent);
    const Index q_dim0 = static_cast<Index>(q_dim0_extent);
    const Index q_dim2 = static_cast<Index>(q_dim2_extent);
    const Index row_count = k_dim1 * q_dim0 * q_dim2;
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? COLUMNS : 0;

    // Phase 1 of 2: reduces the row to squares.
    bf16 k_val_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<LANES>(k_val_raw[c], k_ptr, row * COLUMNS + column);
    }
    float squares_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) squares_of[k] = 0.0f;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float k_val[LANES];
        widen_vec(k_val_raw[c], k_val);
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            const float squares_part = square(k_val[v]);
            squares_of[v % PARTIALS] += squares_part;
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) squares_of[k] += squares_of[k + half];
    }
    const float squares = row_sum_f32(squares_of[0]);

    // Phase 2 of 2: computes rstd; writes keys.
    const float rstd = rstd_of(squares, static_cast<float>(eps));
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        bf16 k_weight_raw[LANES];
        load_lanes<LANES>(k_weight_raw, k_weight_ptr, column);
        float k_weight[LANES];
        widen_vec(k_weight_raw, k_weight);
        float k_val[LANES];
        widen_vec(k_val_raw[c], k_val);
        float result[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            result[v] = normalized(k_val[v], rstd, k_weight[v]);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(keys_ptr, row * COLUMNS + column, result_raw);
    }
}
}  // namespace qk_norm_1

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 256;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 4;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_qk_norm_0_to_1(i64 qk_norm_0_blocks, const bf16* q_ptr, const bf16* q_weight_ptr, bf16* queries_ptr,
        const bf16* k_ptr, const bf16* k_weight_ptr, bf16* keys_ptr, i64 q_dim0, i64 q_dim1, i64 q_dim2, i64 k_dim1,
        double eps) {
    i32 block = block_id();
    if (block < qk_norm_0_blocks) {
        qk_norm_0::run(block, q_ptr, q_weight_ptr, queries_ptr, q_dim0, q_dim1, q_dim2, eps);
        return;
    }
    block -= static_cast<i32>(qk_norm_0_blocks);
    qk_norm_1::run(block, k_ptr, k_weight_ptr, keys_ptr, k_dim1, q_dim0, q_dim2, eps);
}
