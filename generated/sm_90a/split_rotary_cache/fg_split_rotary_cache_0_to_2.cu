// split_rotary_cache_0_to_2: 3 kernels in one launch, emitted by fusegen for sm_90a.
// Grid 14336, block 128. The blocks of each part follow those of the previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// split_rotary_cache_0: pointwise, 8 elements per access.
// Blocks: 8192.
// Reads 35651584 bytes, writes 33554432.
// qkv: bf16 [4096, 6144]; cos, sin: bf16 [4096, 128]; out: bf16 [4096, 32, 128]; all contiguous, 16-byte aligned.
// split_rotary_cache_1: pointwise, 8 elements per access.
// Blocks: 2048.
// Reads 10518528 bytes, writes 8388608.
// qkv: bf16 [4096, 6144]; cos, sin: bf16 [4096, 128]; slots: i64 [4096]; k_cache: bf16 [k_cache_dim0, k_cache_dim1, 8,
// 128]; all contiguous, 16-byte aligned.
// split_rotary_cache_2: pointwise, 8 elements per access.
// Blocks: 4096.
// Reads 8421376 bytes, writes 8388608.
// qkv: bf16 [4096, 6144]; slots: i64 [4096]; v_cache: bf16 [k_cache_dim0, k_cache_dim1, 8, 128]; all contiguous,
// 16-byte aligned.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
#include "../primitives/wrapped_index.cuh"

namespace split_rotary_cache_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rotated in fusegen/specs/rotary.py; its def is line 1:
//   28: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)

__device__ __forceinline__ void split_rotary_cache_0(float qkv, float cos_val, float qkv_other, float sin_val,
        float cos_other, float sin_other, float& result, float& result_2) {
    result = qkv * cos_val + -qkv_other * sin_val;                                    // line 28
    result_2 = qkv_other * cos_other + qkv * sin_other;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const bf16* cos_ptr, const bf16* sin_ptr,
        bf16* out_ptr) {
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i3_outer = position / 64;
    const Index i3 = position - i3_outer * 64;
    const Index i1 = i3_outer / 4096;
    const Index i2 = i3_outer - i1 * 4096;
    const Index qkv_offset = i1 * 128 + i2 * 6144 + i3;
    const Index cos_offset = i2 * 128 + i3;
    const Index out_offset = i1 * 128 + i2 * 4096 + i3;
    bf16 qkv_raw[LANES];
    bf16 cos_val_raw[LANES];
    bf16 qkv_other_raw[LANES];
    bf16 sin_val_raw[LANES];
    bf16 cos_other_raw[LANES];
    bf16 sin_other_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, qkv_offset);
    load_lanes<LANES>(cos_val_raw, cos_ptr, cos_offset);
    load_lanes<LANES>(qkv_other_raw, qkv_ptr, qkv_offset + 64);
    load_lanes<LANES>(sin_val_raw, sin_ptr, cos_offset);
    load_lanes<LANES>(cos_other_raw, cos_ptr, cos_offset + 64);
    load_lanes<LANES>(sin_other_raw, sin_ptr, cos_offset + 64);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float cos_val[LANES];
    widen_vec(cos_val_raw, cos_val);
    float qkv_other[LANES];
    widen_vec(qkv_other_raw, qkv_other);
    float sin_val[LANES];
    widen_vec(sin_val_raw, sin_val);
    float cos_other[LANES];
    widen_vec(cos_other_raw, cos_other);
    float sin_other[LANES];
    widen_vec(sin_other_raw, sin_other);
    float result[LANES];
    float result_2[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) {
        split_rotary_cache_0(qkv[v], cos_val[v], qkv_other[v], sin_val[v], cos_other[v], sin_other[v], result[v],
                result_2[v]);
    }
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, out_offset, result_raw);
    bf16 result_2_raw[LANES];
    narrow_vec(result_2, result_2_raw);
    store_lanes<LANES>(out_ptr, out_offset + 64, result_2_raw);
}
}  // namespace split_rotary_cache_0

namespace split_rotary_cache_1 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// split_rotary_cache in fusegen/specs/heads.py; its def is line 1:
//   32: k_cache.view(-1, *k_cache.shape[2:])[slots] = in_cache(k[0].transpose(0, 1), k_cache.dtype, k_scale)

__device__ __forceinline__ void split_rotary_cache_1(float qkv, float cos_val, float qkv_other, float sin_val,
        float cos_other, float sin_other, float& result, float& result_2) {
    result = qkv * cos_val + -qkv_other * sin_val;                                    // line 32
    result_2 = qkv_other * cos_other + qkv * sin_other;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const bf16* cos_ptr, const bf16* sin_ptr,
        const i64* slots_ptr, bf16* k_cache_ptr, i64 k_cache_dim0_extent, i64 k_cache_dim1_extent) {
    const Index k_cache_dim0 = static_cast<Index>(k_cache_dim0_extent);
    const Index k_cache_dim1 = static_cast<Index>(k_cache_dim1_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i3_outer = position / 64;
    const Index i3 = position - i3_outer * 64;
    const Index i1 = i3_outer / 4096;
    const Index i2 = i3_outer - i1 * 4096;
    const Index k_cache_at = wrapped_index(load(slots_ptr, i2), k_cache_dim0 * k_cache_dim1,
            "fusegen: split_rotary_cache_1: index of 'k_cache' out of range [-(k_cache_dim0 * k_cache_dim1), k_cache_dim0 * k_cache_dim1)");
    const Index qkv_offset = i1 * 128 + i2 * 6144 + i3;
    const Index cos_offset = i2 * 128 + i3;
    bf16 qkv_raw[LANES];
    bf16 cos_val_raw[LANES];
    bf16 qkv_other_raw[LANES];
    bf16 sin_val_raw[LANES];
    bf16 cos_other_raw[LANES];
    bf16 sin_other_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, qkv_offset + 4096);
    load_lanes<LANES>(cos_val_raw, cos_ptr, cos_offset);
    load_lanes<LANES>(qkv_other_raw, qkv_ptr, qkv_offset + 4160);
    load_lanes<LANES>(sin_val_raw, sin_ptr, cos_offset);
    load_lanes<LANES>(cos_other_raw, cos_ptr, cos_offset + 64);
    load_lanes<LANES>(sin_other_raw, sin_ptr, cos_offset + 64);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float cos_val[LANES];
    widen_vec(cos_val_raw, cos_val);
    float qkv_other[LANES];
    widen_vec(qkv_other_raw, qkv_other);
    float sin_val[LANES];
    widen_vec(sin_val_raw, sin_val);
    float cos_other[LANES];
    widen_vec(cos_other_raw, cos_other);
    float sin_other[LANES];
    widen_vec(sin_other_raw, sin_other);
    float result[LANES];
    float result_2[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) {
        split_rotary_cache_1(qkv[v], cos_val[v], qkv_other[v], sin_val[v], cos_other[v], sin_other[v], result[v],
                result_2[v]);
    }
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(k_cache_ptr, k_cache_at * 1024 + i1 * 128 + i3, result_raw);
    bf16 result_2_raw[LANES];
    narrow_vec(result_2, result_2_raw);
    store_lanes<LANES>(k_cache_ptr, k_cache_at * 1024 + i1 * 128 + i3 + 64, result_2_raw);
}
}  // namespace split_rotary_cache_1

namespace split_rotary_cache_2 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// split_rotary_cache in fusegen/specs/heads.py; its def is line 1:
//   33: v_cache.view(-1, *v_cache.shape[2:])[slots] = in_cache(v[0].transpose(0, 1), v_cache.dtype, v_scale)

__device__ __forceinline__ float split_rotary_cache_2(float qkv) {
    return qkv;                                                                       // line 33
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* qkv_ptr, const i64* slots_ptr, bf16* v_cache_ptr,
        i64 k_cache_dim0_extent, i64 k_cache_dim1_extent) {
    const Index k_cache_dim0 = static_cast<Index>(k_cache_dim0_extent);
    const Index k_cache_dim1 = static_cast<Index>(k_cache_dim1_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 1024;
    const Index i2 = position - i0 * 1024;
    const Index v_cache_at = wrapped_index(load(slots_ptr, i0), k_cache_dim0 * k_cache_dim1,
            "fusegen: split_rotary_cache_2: index of 'v_cache' out of range [-(k_cache_dim0 * k_cache_dim1), k_cache_dim0 * k_cache_dim1)");
    bf16 qkv_raw[LANES];
    load_lanes<LANES>(qkv_raw, qkv_ptr, i0 * 6144 + i2 + 5120);
    float qkv[LANES];
    widen_vec(qkv_raw, qkv);
    float result[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) result[v] = split_rotary_cache_2(qkv[v]);
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(v_cache_ptr, v_cache_at * 1024 + i2, result_raw);
}
}  // namespace split_rotary_cache_2

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 128;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 8;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_split_rotary_cache_0_to_2(i64 split_rotary_cache_0_blocks, i64 split_rotary_cache_1_blocks, const bf16* qkv_ptr,
        const bf16* cos_ptr, const bf16* sin_ptr, bf16* out_ptr, const i64* slots_ptr, bf16* k_cache_ptr,
        bf16* v_cache_ptr, i64 k_cache_dim0, i64 k_cache_dim1) {
    i32 block = block_id();
    if (block < split_rotary_cache_0_blocks) {
        split_rotary_cache_0::run(block, qkv_ptr, cos_ptr, sin_ptr, out_ptr);
        return;
    }
    block -= static_cast<i32>(split_rotary_cache_0_blocks);
    if (block < split_rotary_cache_1_blocks) {
        split_rotary_cache_1::run(block, qkv_ptr, cos_ptr, sin_ptr, slots_ptr, k_cache_ptr, k_cache_dim0, k_cache_dim1);
        return;
    }
    block -= static_cast<i32>(split_rotary_cache_1_blocks);
    split_rotary_cache_2::run(block, qkv_ptr, slots_ptr, v_cache_ptr, k_cache_dim0, k_cache_dim1);
}
