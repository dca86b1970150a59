// linear_cross_entropy_rows_0_1: row reduction, 3 phases, rows read once into shared memory, emitted by fusegen for sm_90a.
// Grid min(block_rows_0, 264) * 1, block 512, 107008 bytes of shared memory: the shared memory of a block holds a row and the next ones, which are prefetched.
// Reads (0 + min(block_rows_0, 4096) * 8) + min(block_rows_0, block_rows_0 * 32000) * 2 bytes, writes block_rows_0 * 2.
#include "../primitives/types.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/copy_async.cuh"
#include "../primitives/copy_async_commit.cuh"
#include "../primitives/copy_async_wait.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/load.i64.bf16.cuh"
#include "../primitives/load_once.i64.bf16.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_load_vec.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store.i64.bf16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float amax_f32_identity() {
    return -bit_cast<float>(0x7f800000u);
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ float linear_cross_entropy_rows_0_1_1(float value_4, float largest) {
    return fast_exp(value_4 - largest);                                               // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
}

__device__ __forceinline__ float linear_cross_entropy_rows_0_1_row_2(float value_4_2, float largest, float total) {
    return value_4_2 - largest - logf(total);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 512;  // per row
constexpr i32 WARPS = 16;
constexpr i32 MEETING = 16;  // lanes that each take the partial result of a warp: a power of two
constexpr i32 SUMS = 4;  // independent partial sums per thread, which hide the latency of additions
constexpr i32 CHUNKS = 8;  // vectors per thread
constexpr i32 SLOTS = 13;  // pipeline stages: vectors per thread in shared memory
constexpr i32 AHEAD = SLOTS - CHUNKS;  // of them for later rows
constexpr i32 SLOT = THREADS * LANES;  // elements between stages

// Writes a warp's partial result to shared memory; after a barrier, row_amax_f32_meet combines those of all warps.
template <typename Scratch>
__device__ __forceinline__ void row_amax_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_amax_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Writes a warp's partial result to shared memory; after a barrier, row_sum_f32_meet combines those of all warps.
template <typename Scratch>
__device__ __forceinline__ void row_sum_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the partial results of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(512, 2)
fg_linear_cross_entropy_rows_0_1(const bf16* value_4_ptr, const i64* operand_0_ptr, bf16* result_0_ptr, i64 block_rows_0, i64 block_start_0) {
    wait_for_previous();
    const Index row_count = block_rows_0;
    const Index column_count = 32000;
    const i32 thread = thread_id();
    // This block's share of the rows.
    constexpr i32 PARTS = 264;  // at most: every block has rows
    const Index part = block_id();
    i32 turn = 0;  // rows alternate between two scratch buffers, so that one barrier per phase suffices
    auto value_4_staged = shared_array<bf16>(512);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return base + c < SLOTS ? base + c : base + c - SLOTS; };
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < column_count) {
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(value_4_staged, slot * SLOT + thread * LANES + v, value_4_ptr, row * 32000 + column + v);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();
        const Index value_at = checked_index(widen(load_once(operand_0_ptr, block_start_0 + row)), 32000, "fusegen: linear_cross_entropy_rows_0_1: index of a computed tensor out of range [0, 32000)");

        // Phase 1 of 3: reduces each row to largest.
        const float value_4_2 = widen(load(value_4_ptr, row * 32000 + value_at));
        float largest_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float value_4[LANES];
            bf16 value_4_raw[LANES];
            shared_load_vec(value_4_raw, value_4_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(value_4_raw, value_4);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], value_4[v]);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
        }
        float largest = largest_of[0];
        row_amax_f32_leave(largest, shared_array<float>(0) + turn * WARPS);
        block_sync();
        largest = row_amax_f32_meet(shared_array<float>(0) + turn * WARPS);

        // Phase 2 of 3: reduces each row to total.
        float total_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            float value_4[LANES];
            bf16 value_4_raw[LANES];
            shared_load_vec(value_4_raw, value_4_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(value_4_raw, value_4);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
            float total_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                total_part[v] = linear_cross_entropy_rows_0_1_1(value_4[v], largest);
                total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
        }
        float total = total_of[0];
        row_sum_f32_leave(total, shared_array<float>(256) + turn * WARPS);
        block_sync();
        total = row_sum_f32_meet(shared_array<float>(256) + turn * WARPS);

        // Phase 3 of 3: computes row_value; writes result_0.
        const float row_value = linear_cross_entropy_rows_0_1_row_2(value_4_2, largest, total);
        if (thread == 0) {
            bf16 narrowed;
            narrow(row_value, narrowed);
            store(result_0_ptr, block_start_0 + row, narrowed);
        }
        turn ^= 1;
        base = slot_of(CHUNKS);
    }
}
