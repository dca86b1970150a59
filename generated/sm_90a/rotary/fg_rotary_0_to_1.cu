// rotary_0_to_1: 2 kernels in one launch, emitted by fusegen for sm_90a.
// Grid ((q_dim0 * q_dim1 * q_dim2 * 64 + 1023) / 1024) + ((k_dim1 * q_dim0 * q_dim2 * 64 + 1023) / 1024), block 128.
// The blocks of each part follow those of the previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// rotary_0: pointwise, 8 elements per access.
// Blocks: (q_dim0 * q_dim1 * q_dim2 * 64 + 1023) / 1024.
// Reads q_dim0 * q_dim1 * q_dim2 * 256 + q_dim2 * 512 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// q, queries: bf16 [q_dim0, q_dim1, q_dim2, 128]; cos, sin: bf16 [q_dim2, 128]; all contiguous, 16-byte aligned.
// rotary_1: pointwise, 8 elements per access.
// Blocks: (k_dim1 * q_dim0 * q_dim2 * 64 + 1023) / 1024.
// Reads k_dim1 * q_dim0 * q_dim2 * 256 + q_dim2 * 512 bytes, writes k_dim1 * q_dim0 * q_dim2 * 256.
// k, keys: bf16 [q_dim0, k_dim1, q_dim2, 128]; cos, sin: bf16 [q_dim2, 128]; all contiguous, 16-byte aligned.
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

// rotary_1: this text with other arguments.
namespace rotary_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rotated in fusegen/specs/rotary.py; its def is line 1:
//   28: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)

__device__ __forceinline__ void rotary_0(float q, float cos_val, float q_other, float sin_val, float cos_other,
        float sin_other, float& result, float& result_2) {
    result = q * cos_val + -q_other * sin_val;                                        // line 28
    result_2 = q_other * cos_other + q * sin_other;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

__device__ __forceinline__ void run(i32 block, const bf16* q_ptr, const bf16* cos_ptr, const bf16* sin_ptr,
        bf16* queries_ptr, i64 q_dim2_extent, i64 q_dim0_extent, i64 q_dim1_extent) {
    const Index q_dim2 = static_cast<Index>(q_dim2_extent);
    const Index q_dim0 = static_cast<Index>(q_dim0_extent);
    const Index q_dim1 = static_cast<Index>(q_dim1_extent);
    const Index element_count = q_dim0 * q_dim1 * q_dim2 * 64;
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;

    if (position + LANES <= element_count) {
        const Index i3_outer = position / 64;
        const Index i3 = position - i3_outer * 64;
        const Index i1 = i3_outer / q_dim2;
        const Index i2 = i3_outer - i1 * q_dim2;
        const Index q_offset = i1 * q_dim2 * 128 + i2 * 128 + i3;
        const Index cos_offset = i2 * 128 + i3;
        bf16 q_raw[LANES];
        bf16 cos_val_raw[LANES];
        bf16 q_other_raw[LANES];
        bf16 sin_val_raw[LANES];
        bf16 cos_other_raw[LANES];
        bf16 sin_other_raw[LANES];
        load_lanes<LANES>(q_raw, q_ptr, q_offset);
        load_lanes<LANES>(cos_val_raw, cos_ptr, cos_offset);
        load_lanes<LANES>(q_other_raw, q_ptr, q_offset + 64);
        load_lanes<LANES>(sin_val_raw, sin_ptr, cos_offset);
        load_lanes<LANES>(cos_other_raw, cos_ptr, cos_offset + 64);
        load_lanes<LANES>(sin_other_raw, sin_ptr, cos_offset + 64);
        float q[LANES];
        widen_vec(q_raw, q);
        float cos_val[LANES];
        widen_vec(cos_val_raw, cos_val);
        float q_other[LANES];
        widen_vec(q_other_raw, q_other);
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
            rotary_0(q[v], cos_val[v], q_other[v], sin_val[v], cos_other[v], sin_other[v], result[v], result_2[v]);
        }
        bf16 result_raw[LANES];
        narrow_vec(result, result_raw);
        store_lanes<LANES>(queries_ptr, q_offset, result_raw);
        bf16 result_2_raw[LANES];
        narrow_vec(result_2, result_2_raw);
        store_lanes<LANES>(queries_ptr, q_offset + 64, result_2_raw);
    }
}
}  // namespace rotary_0

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 128;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 8;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_rotary_0_to_1(i64 rotary_0_blocks, const bf16* q_ptr, const bf16* cos_ptr, const bf16* sin_ptr, bf16* queries_ptr,
        const bf16* k_ptr, bf16* keys_ptr, i64 q_dim2, i64 q_dim0, i64 q_dim1, i64 k_dim1) {
    i32 block = block_id();
    if (block < rotary_0_blocks) {
        rotary_0::run(block, q_ptr, cos_ptr, sin_ptr, queries_ptr, q_dim2, q_dim0, q_dim1);
        return;
    }
    block -= static_cast<i32>(rotary_0_blocks);
    rotary_0::run(block, k_ptr, cos_ptr, sin_ptr, keys_ptr, q_dim2, k_dim1, q_dim0);  // rotary_1
}
