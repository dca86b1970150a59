// bias_split_heads_val_0_to_2: 3 kernels in one launch, emitted by fusegen for sm_90a.
// Grid qkv_dim0 * qkv_dim1 * 4 + qkv_dim0 * qkv_dim1 + qkv_dim0 * qkv_dim1, block 128. The blocks of each part follow
// those of the previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// bias_split_heads_val_0: pointwise, 8 elements per access.
// Blocks: qkv_dim0 * qkv_dim1 * 4.
// Reads qkv_dim0 * qkv_dim1 * 8192 + 8192 bytes, writes qkv_dim0 * qkv_dim1 * 8192.
// qkv: bf16 [qkv_dim0, qkv_dim1, 6144]; bias: bf16 [6144]; q: bf16 [qkv_dim0, 32, qkv_dim1, 128]; all contiguous,
// 16-byte aligned.
// bias_split_heads_val_1: pointwise, 8 elements per access.
// Blocks: qkv_dim0 * qkv_dim1.
// Reads qkv_dim0 * qkv_dim1 * 2048 + 2048 bytes, writes qkv_dim0 * qkv_dim1 * 2048.
// qkv: bf16 [qkv_dim0, qkv_dim1, 6144]; bias: bf16 [6144]; k: bf16 [qkv_dim0, 8, qkv_dim1, 128]; all contiguous,
// 16-byte aligned.
// bias_split_heads_val_2: pointwise, 8 elements per access.
// Blocks: qkv_dim0 * qkv_dim1.
// Reads qkv_dim0 * qkv_dim1 * 2048 + 2048 bytes, writes qkv_dim0 * qkv_dim1 * 2048.
// qkv: bf16 [qkv_dim0, qkv_dim1, 6144]; bias: bf16 [6144]; v: bf16 [qkv_dim0, 8, qkv_dim1, 128]; all contiguous,
// 16-byte aligned.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
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

namespace bias_split_heads_val_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// bias_split_heads in fusegen/specs/heads.py; its def is line 1:
//   21: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)

__device__ __forceinline__ float bias_split_heads_val_0(float qkv, float bias) {
    return qkv + bias;                                                                // line 21
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* q_ptr,
        i64 qkv_dim1_extent) {
    const Index qkv_dim1 = static_cast<Index>(qkv_dim1_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i2_within_outer = position / 128;
    const Index i2_within = position - i2_within_outer * 128;
    const Index i2_part_outer = i2_within_outer / 32;
    const Index i2_part = i2_within_outer - i2_part_outer * 32;
    const Index i0 = i2_part_outer / qkv_dim1;
    const Index i1 = i2_part_outer - i0 * qkv_dim1;
    bf16 qkv_raw[LANES];
    bf16 bias_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within);
    load_lanes<LANES>(bias_raw, bias_ptr, i2_part * 128 + i2_within);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float bias[LANES];
    widen_vec(bias_raw, bias);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = bias_split_heads_val_0(qkv[v], bias[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(q_ptr, i1 * 128 + i2_part * qkv_dim1 * 128 + i0 * qkv_dim1 * 4096 + i2_within, result_raw);
}
}  // namespace bias_split_heads_val_0

namespace bias_split_heads_val_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// bias_split_heads in fusegen/specs/heads.py; its def is line 1:
//   21: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)

__device__ __forceinline__ float bias_split_heads_val_1(float qkv, float bias) {
    return qkv + bias;                                                                // line 21
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* k_ptr,
        i64 qkv_dim1_extent) {
    const Index qkv_dim1 = static_cast<Index>(qkv_dim1_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i2_within_outer = position / 128;
    const Index i2_within = position - i2_within_outer * 128;
    const Index i2_part_outer = i2_within_outer / 8;
    const Index i2_part = i2_within_outer - i2_part_outer * 8;
    const Index i0 = i2_part_outer / qkv_dim1;
    const Index i1 = i2_part_outer - i0 * qkv_dim1;
    bf16 qkv_raw[LANES];
    bf16 bias_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within + 4096);
    load_lanes<LANES>(bias_raw, bias_ptr, i2_part * 128 + i2_within + 4096);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float bias[LANES];
    widen_vec(bias_raw, bias);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = bias_split_heads_val_1(qkv[v], bias[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(k_ptr, i0 * qkv_dim1 * 1024 + i1 * 128 + i2_part * qkv_dim1 * 128 + i2_within, result_raw);
}
}  // namespace bias_split_heads_val_1

namespace bias_split_heads_val_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// bias_split_heads in fusegen/specs/heads.py; its def is line 1:
//   21: q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)

__device__ __forceinline__ float bias_split_heads_val_2(float qkv, float bias) {
    return qkv + bias;                                                                // line 21
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const bf16* bias_ptr, bf16* v_ptr,
        i64 qkv_dim1_extent) {
    const Index qkv_dim1 = static_cast<Index>(qkv_dim1_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i2_within_outer = position / 128;
    const Index i2_within = position - i2_within_outer * 128;
    const Index i2_part_outer = i2_within_outer / 8;
    const Index i2_part = i2_within_outer - i2_part_outer * 8;
    const Index i0 = i2_part_outer / qkv_dim1;
    const Index i1 = i2_part_outer - i0 * qkv_dim1;
    bf16 qkv_raw[LANES];
    bf16 bias_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, i2_part * 128 + i0 * qkv_dim1 * 6144 + i1 * 6144 + i2_within + 5120);
    load_lanes<LANES>(bias_raw, bias_ptr, i2_part * 128 + i2_within + 5120);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float bias[LANES];
    widen_vec(bias_raw, bias);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = bias_split_heads_val_2(qkv[v], bias[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(v_ptr, i0 * qkv_dim1 * 1024 + i1 * 128 + i2_part * qkv_dim1 * 128 + i2_within, result_raw);
}
}  // namespace bias_split_heads_val_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 128;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 1;  // at least, so that a thread may take most registers

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_bias_split_heads_val_0_to_2(i64 bias_split_heads_val_0_blocks, i64 bias_split_heads_val_1_blocks,
        const bf16* qkv_ptr, const bf16* bias_ptr, bf16* q_ptr, bf16* k_ptr, bf16* v_ptr, i64 qkv_dim1) {
    i32 block = block_id();
    if (block < bias_split_heads_val_0_blocks) {
        bias_split_heads_val_0::run(block, qkv_ptr, bias_ptr, q_ptr, qkv_dim1);
        return;
    }
    block -= static_cast<i32>(bias_split_heads_val_0_blocks);
    if (block < bias_split_heads_val_1_blocks) {
        bias_split_heads_val_1::run(block, qkv_ptr, bias_ptr, k_ptr, qkv_dim1);
        return;
    }
    block -= static_cast<i32>(bias_split_heads_val_1_blocks);
    bias_split_heads_val_2::run(block, qkv_ptr, bias_ptr, v_ptr, qkv_dim1);
}
