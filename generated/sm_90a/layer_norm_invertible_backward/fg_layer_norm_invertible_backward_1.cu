// layer_norm_invertible_backward_1: row reduction, 2 phases, rows read once, held in registers, emitted by fusegen for sm_90a.
// Grid 1, block 512, 256 bytes of shared memory: a row fits the registers of 512 threads, 8 elements each.
// Reads 8192 bytes, writes 1.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.8.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/narrow.bool.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/store.bool.bf16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bool.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ i64 amax_i64_identity() {
    return (-9223372036854775807LL - 1);
}

__device__ __forceinline__ i64 amax_i64_combine(i64 a, i64 b) {
    return maximum(a, b);
}

__device__ __forceinline__ i64 layer_norm_invertible_backward_1_0(float weight) {
    return static_cast<i64>(static_cast<u8>(static_cast<i64>(weight == 0.0f)));       // line 12: return dx.to(y.dtype), (dy * normalized).sum(0), dy.sum(0), (weight == …
}

__device__ __forceinline__ bool layer_norm_invertible_backward_1_row_1(i64 largest) {
    return largest != 0;                                                              // line 12: return dx.to(y.dtype), (dy * normalized).sum(0), dy.sum(0), (weight == …
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 512;  // that share a row
constexpr i32 MEETING = 16;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before
constexpr i32 CHUNKS = 1;  // groups of lanes that a thread holds

// Leaves a warp's part of what the threads of a row combine; row_amax_i64_meet takes all parts, behind a barrier.
template <typename Scratch>
__device__ __forceinline__ void row_amax_i64_leave(i64 value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_i64_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the parts of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ i64 row_amax_i64_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    i64 value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = amax_i64_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(512, 2)
fg_layer_norm_invertible_backward_1(const bf16* weight_ptr, bool* out_3_ptr) {
    wait_for_previous();
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());
    // What all rows share is asked for together with the row.
    bf16 weight_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        load_lanes<8>(weight_raw[c], weight_ptr, column);
    }

    // Phase 1 of 2: reduces each row to largest.
    i64 largest_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        float weight[LANES];
        widen_vec(weight_raw[c], weight);
        i64 largest_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            largest_part[v] = layer_norm_invertible_backward_1_0(weight[v]);
            largest_of[v % SUMS] = amax_i64_combine(largest_of[v % SUMS], largest_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_i64_combine(largest_of[k], largest_of[k + half]);
    }
    i64 largest = largest_of[0];
    row_amax_i64_leave(largest, shared_array<i64>(0));
    block_sync();
    largest = row_amax_i64_meet(shared_array<i64>(0));

    // Phase 2 of 2: computes row_value; writes out_3.
    const bool row_value = layer_norm_invertible_backward_1_row_1(largest);
    if (thread == 0) {
        bool narrowed;
        narrow(row_value, narrowed);
        store(out_3_ptr, 0, narrowed);
    }
}
