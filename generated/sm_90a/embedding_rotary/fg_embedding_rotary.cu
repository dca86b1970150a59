// embedding_rotary: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 8192, block 128.
// Reads input_dim0 * 32768 + min(input_dim0 * 16777216, weight_dim0 * 4096) * 2 + 2097152 bytes, writes input_dim0 *
// 33554432.
// weight: bf16 [weight_dim0, 4096]; cos, sin: bf16 [4096, 128]; input: i64 [input_dim0, 4096]; out: bf16 [input_dim0,
// 4096, 4096]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
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

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// rotated in fusegen/specs/rotary.py; its def is line 1:
//   28: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)

__device__ __forceinline__ void embedding_rotary(float weight, float cos_val, float weight_at_index, float sin_val,
        float cos_other, float sin_other, float& result, float& result_2) {
    result = weight * cos_val + -weight_at_index * sin_val;                           // line 28
    result_2 = weight_at_index * cos_other + weight * sin_other;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;
constexpr i32 BLOCKS_PER_SM = 8;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_embedding_rotary(const bf16* weight_ptr, const bf16* cos_ptr, const bf16* sin_ptr, const i64* input_ptr,
        bf16* out_ptr, i64 weight_dim0_extent) {
    const Index weight_dim0 = static_cast<Index>(weight_dim0_extent);
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i3_outer = position / 64;
    const Index i3 = position - i3_outer * 64;
    const Index i2_outer = i3_outer / 4096;
    const Index i2 = i3_outer - i2_outer * 4096;
    const Index i0 = i2_outer / 32;
    const Index i1 = i2_outer - i0 * 32;
    const Index weight_at = checked_index(load(input_ptr, i0 * 4096 + i2), weight_dim0,
            "fusegen: embedding_rotary: index of 'weight' out of range [0, weight_dim0)");
    const Index cos_offset = i2 * 128 + i3;
    const Index out_offset = i1 * 128 + i0 * 16777216 + i2 * 4096 + i3;
    bf16 weight_raw[LANES];
    bf16 cos_val_raw[LANES];
    bf16 weight_at_index_raw[LANES];
    bf16 sin_val_raw[LANES];
    bf16 cos_other_raw[LANES];
    bf16 sin_other_raw[LANES];
    load_lanes<LANES>(weight_raw, weight_ptr, i1 * 128 + weight_at * 4096 + i3);
    load_lanes<LANES>(cos_val_raw, cos_ptr, cos_offset);
    load_lanes<LANES>(weight_at_index_raw, weight_ptr, i1 * 128 + weight_at * 4096 + i3 + 64);
    load_lanes<LANES>(sin_val_raw, sin_ptr, cos_offset);
    load_lanes<LANES>(cos_other_raw, cos_ptr, cos_offset + 64);
    load_lanes<LANES>(sin_other_raw, sin_ptr, cos_offset + 64);
    float weight[LANES];
    widen_vec(weight_raw, weight);
    float cos_val[LANES];
    widen_vec(cos_val_raw, cos_val);
    float weight_at_index[LANES];
    widen_vec(weight_at_index_raw, weight_at_index);
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
        embedding_rotary(weight[v], cos_val[v], weight_at_index[v], sin_val[v], cos_other[v], sin_other[v], result[v],
                result_2[v]);
    }
    bf16 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<LANES>(out_ptr, out_offset, result_raw);
    bf16 result_2_raw[LANES];
    narrow_vec(result_2, result_2_raw);
    store_lanes<LANES>(out_ptr, out_offset + 64, result_2_raw);
}
