// layer_norm_backward_combine: adds the partial column sums of all blocks, emitted by fusegen for sm_90a.
// Grid 128, block 1024, 8192 bytes of shared memory.
// Reads min(x_dim0, 264) * 32768 bytes, writes 16384.
// partial_column_total, partial_column_total_2: float [min(x_dim0, 264), 4096]; dweight, dbias: bf16 [4096]; all
// contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/store.bf16.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/wait_for_previous.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 32;
constexpr i32 ROWS = 32;
constexpr Index PARTS = 264;
constexpr i32 COLUMN_TOTAL_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 COLUMN_TOTAL_2_OFFSET = COLUMN_TOTAL_OFFSET + COLUMNS * ROWS * sizeof(float);

extern "C" __global__ void __launch_bounds__(COLUMNS * ROWS)
fg_layer_norm_backward_combine(const float* partial_column_total_ptr, const float* partial_column_total_2_ptr,
        bf16* dweight_ptr, bf16* dbias_ptr, i64 x_dim0_extent) {
    const Index x_dim0 = static_cast<Index>(x_dim0_extent);
    wait_for_previous();
    const Index part_count = min(x_dim0, PARTS);  // the blocks that summed rows
    const i32 lane = thread_id() % COLUMNS;
    const i32 row = thread_id() / COLUMNS;
    const Index column = static_cast<Index>(block_id()) * COLUMNS + lane;
    auto column_total_shared = shared_array<float>(COLUMN_TOTAL_OFFSET);
    float column_total = 0.0f;
    for (Index part = row; part < part_count; part += ROWS) {
        column_total += load(partial_column_total_ptr, part * 4096 + column);
    }
    shared_store(column_total_shared, row * COLUMNS + lane, column_total);
    auto column_total_2_shared = shared_array<float>(COLUMN_TOTAL_2_OFFSET);
    float column_total_2 = 0.0f;
    for (Index part = row; part < part_count; part += ROWS) {
        column_total_2 += load(partial_column_total_2_ptr, part * 4096 + column);
    }
    shared_store(column_total_2_shared, row * COLUMNS + lane, column_total_2);
    // Tree reduction, which is more accurate than adding in turn.
#pragma unroll
    for (i32 half = ROWS / 2; half > 0; half /= 2) {
        block_sync();
        if (row < half) {
            column_total += shared_load(column_total_shared, (row + half) * COLUMNS + lane);
            shared_store(column_total_shared, row * COLUMNS + lane, column_total);
            column_total_2 += shared_load(column_total_2_shared, (row + half) * COLUMNS + lane);
            shared_store(column_total_2_shared, row * COLUMNS + lane, column_total_2);
        }
    }
    if (row > 0) return;
    store_narrowed(dweight_ptr, column, column_total);
    store_narrowed(dbias_ptr, column, column_total_2);
}
