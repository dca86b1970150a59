// linear_cross_entropy_0: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid 4, block 128.
// Reads 32768 bytes, writes 36864.
// target, chosen: i64 [4096]; differs: bool [4096]; all contiguous, 16-byte aligned.
// A launch of its own reads differs: row reduction.
// A launch of its own reads chosen: loop over blocks of rows.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bool.i64.cuh"
#include "../primitives/narrow_vec.cuh"
#include "../primitives/store_vec.8.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.cuh"
#include "../primitives/widen_vec.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// loss_of in fusegen/specs/loss.py; its def is line 1:
//   14: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction,
//       label_smoothing=label_smoothing)

__device__ __forceinline__ void linear_cross_entropy_0(i64 target, i64 ignore_index, i64& result, bool& result_2) {
    const bool differs = target != ignore_index;                                      // line 14
    result = differs ? target : 0LL;
    result_2 = differs;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_linear_cross_entropy_0(const i64* target_ptr, bool* differs_ptr, i64* chosen_ptr, i64 ignore_index) {
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    i64 target_raw[LANES];
    load_lanes<2>(target_raw, target_ptr, position);
    i64 target[LANES];
    widen_vec(target_raw, target);
    i64 result[LANES];
    bool result_2[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) linear_cross_entropy_0(target[v], ignore_index, result[v], result_2[v]);
    i64 result_raw[LANES];
    narrow_vec(result, result_raw);
    store_lanes<2>(chosen_ptr, position, result_raw);
    bool result_2_raw[LANES];
    narrow_vec(result_2, result_2_raw);
    store_lanes<LANES>(differs_ptr, position, result_2_raw);
}
