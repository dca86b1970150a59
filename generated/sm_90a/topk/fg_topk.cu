// topk: row reduction, 9 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid (input_dim0 + 63) / 64, block 256: a row fits the registers of 4 threads, 16 elements per thread.
// Reads input_dim0 * 128 bytes, writes input_dim0 * 80.
// Indices have 32 bits: tensors of 2^31 - 2^22 elements or more take a kernel of their own.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/shift_right.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/sort_key.cuh"
#include "../primitives/sorted_value.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/store.i64.bf16.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// topk in selection.py; its def is line 1:
//    7: values, indices = input.topk(k, largest=largest)

__device__ __forceinline__ i64 amin_i64_identity() {
    return 0x7FFFFFFFFFFFFFFFLL;
}

__device__ __forceinline__ i64 amin_i64_combine(i64 a, i64 b) {
    return minimum(a, b);
}

__device__ __forceinline__ void elements_of_phase_1_of_topk(float input, i64 coordinate, i64& smallest_part,
        i64& bits) {
    bits = sort_key(input, coordinate) ^ ~0xFFFFFFFFLL;                               // line 7
    smallest_part = bits;
}

__device__ __forceinline__ void shifted_and_element_of_topk(i64 smallest, i64& shifted, float& element) {
    shifted = shift_right(smallest & 0xFFFFFFFFLL, 1LL);                              // line 7
    element = sorted_value(smallest ^ ~0xFFFFFFFFLL);
}

__device__ __forceinline__ i64 chosen_of_topk(i64 bits, i64 smallest) {
    return bits > smallest ? bits : 0x7F80000200000000LL;                             // line 7
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 4;  // per row
constexpr i32 SUMS = 4;  // independent partial sums per thread, which hide the latency of additions
constexpr i32 ROWS = 64;  // per block at a time
constexpr i32 CHUNKS = 2;  // vectors per thread

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ i64 row_amin_i64(i64 value) {
#pragma unroll
    for (i32 mask = THREADS / 2; mask > 0; mask /= 2) value = amin_i64_combine(value, shuffle_xor(value, mask));
    return value;
}

constexpr i32 BLOCKS_PER_SM = 3;  // at least, which limits the registers of a thread

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, BLOCKS_PER_SM)
fg_topk(const bf16* input_ptr, i64* out_1_ptr, bf16* out_0_ptr, i64 input_dim0_extent) {
    const Index row_count = static_cast<Index>(input_dim0_extent);
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block_id()) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? 64 : 0;

    // Phase 1 of 9: reduces each row to smallest; stores bits for later phases.
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<LANES>(input_raw[c], input_ptr, row * 64 + column);
    }
    i64 bits_kept[CHUNKS][LANES];
    i64 smallest_of[SUMS];
#pragma unroll
    for (i32 k = 0; k < SUMS; ++k) smallest_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float input[LANES];
        widen_vec(input_raw[c], input);
        i64 bits[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            i64 smallest_part;
            elements_of_phase_1_of_topk(input[v], column + v, smallest_part, bits[v]);
            smallest_of[v % SUMS] = amin_i64_combine(smallest_of[v % SUMS], smallest_part);
            bits_kept[c][v] = bits[v];
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_of[k] = amin_i64_combine(smallest_of[k], smallest_of[k + half]);
    }
    i64 smallest = smallest_of[0];
    smallest = row_amin_i64(smallest);

    // Phases 2 to 8 of 9, one per turn: computes shifted, element; reduces each row to smallest_next; writes out_1,
    // out_0.
    i64 smallest_each[8] = {smallest};
#pragma unroll
    for (i32 turn = 0; turn < 7; ++turn) {
        i64 shifted;
        float element;
        shifted_and_element_of_topk(smallest_each[turn], shifted, element);
        i64 smallest_next_of[SUMS];
#pragma unroll
        for (i32 k = 0; k < SUMS; ++k) smallest_next_of[k] = amin_i64_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            const i64 (&bits)[LANES] = bits_kept[c];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                const i64 smallest_next_part = chosen_of_topk(bits[v], smallest_each[turn]);
                smallest_next_of[v % SUMS] = amin_i64_combine(smallest_next_of[v % SUMS], smallest_next_part);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) {
                smallest_next_of[k] = amin_i64_combine(smallest_next_of[k], smallest_next_of[k + half]);
            }
        }
        i64 smallest_next = smallest_next_of[0];
        smallest_next = row_amin_i64(smallest_next);
        if (thread == 0 && exists) {
            store_narrowed(out_1_ptr, row * 8 + turn, shifted);
            store_narrowed(out_0_ptr, row * 8 + turn, element);
        }
        smallest_each[turn + 1] = smallest_next;
    }

    // Phase 9 of 9: computes shifted, element; writes out_1, out_0.
    i64 shifted;
    float element;
    shifted_and_element_of_topk(smallest_each[7], shifted, element);
    if (thread == 0 && exists) {
        store_narrowed(out_1_ptr, row * 8 + 7, shifted);
        store_narrowed(out_0_ptr, row * 8 + 7, element);
    }
}
