// cross_entropy_0: row reduction, 3 phases, rows read once into shared memory, emitted by fusegen for sm_90a.
// Grid min(8192, 132) * 1, block 512, 131584 bytes of shared memory: the shared memory of a block holds a row and the next ones, which are prefetched.
// Reads 524288000 bytes, writes 65536.
#include "../primitives/types.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/copy_async.cuh"
#include "../primitives/copy_async_commit.cuh"
#include "../primitives/copy_async_wait.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/maximum.float.cuh"
#include "../primitives/narrow.bf16.float.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_load_vec.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store.bf16.float.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.bf16.float.cuh"
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

__device__ __forceinline__ float cross_entropy_0_1(float input, float largest) {
    return fast_exp(input - largest);                                                 // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
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
constexpr i32 SLOTS = 16;  // pipeline stages: vectors per thread in shared memory
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

extern "C" __global__ void __launch_bounds__(512, 1)
fg_cross_entropy_0(const bf16* input_ptr, float* value_4_ptr, float* value_7_ptr) {
    const Index row_count = 8192;
    const Index column_count = 32000;
    const i32 thread = thread_id();
    // This block's share of the rows.
    constexpr i32 PARTS = 132;  // at most: every block has rows
    const Index part = block_id();
    i32 turn = 0;  // rows alternate between two scratch buffers, so that one barrier per phase suffices
    auto input_staged = shared_array<bf16>(512);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // consecutive; opaque: not kept in a register
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < column_count) {
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(input_staged, slot * SLOT + thread * LANES + v, input_ptr, row * 32000 + column + v);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 3: reduces each row to largest.
        bf16 input_raw[CHUNKS][LANES];
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            shared_load_vec(input_raw[c], input_staged, slot_of(c) * SLOT + thread * LANES);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
        }
        float largest_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float input[LANES];
            widen_vec(input_raw[c], input);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], input[v]);
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

        // Phase 2 of 3: reduces each row to total; writes value_4.
        float total_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float input[LANES];
            widen_vec(input_raw[c], input);
            float total_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                total_part[v] = cross_entropy_0_1(input[v], largest);
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
        if (thread == 0) {
            float narrowed;
            narrow(largest, narrowed);
            store(value_4_ptr, row, narrowed);
        }

        // Phase 3 of 3: writes value_7.
        if (thread == 0) {
            float narrowed;
            narrow(total, narrowed);
            store(value_7_ptr, row, narrowed);
        }
        turn ^= 1;
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
}
