// topk: row reduction, 9 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid (input_dim0 + 63) / 64, block 256: a row fits the registers of 4 threads, 16 elements per thread.
// Reads input_dim0 * 128 bytes, writes input_dim0 * 80.
// input: bf16 [input_dim0, 64]; values: bf16 [input_dim0, 8]; indices: i64 [input_dim0, 8]; all contiguous, 16-byte
// aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/above_all_keys.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/sort_key.cuh"
#include "../primitives/descending_key.cuh"
#include "../primitives/sorted_value.cuh"
#include "../primitives/descending_value.cuh"
#include "../primitives/key_index.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/store.i64.bf16.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// topk in fusegen/specs/selection.py; its def is line 1:
//    7: values, indices = input.topk(k, largest=largest)

__device__ __forceinline__ i64 amin_i64_identity() {
    return 0x7FFFFFFFFFFFFFFFLL;
}

__device__ __forceinline__ i64 amin_i64_combine(i64 a, i64 b) {
    return minimum(a, b);
}

__device__ __forceinline__ i64 key_of_element_of(float input, i64 coordinate) {
    return descending_key(input, coordinate);                                         // line 7
}

__device__ __forceinline__ void element_index_and_element_of(i64 smallest_key, i64& element_index, float& element) {
    element_index = key_index(smallest_key);                                          // line 7
    element = descending_value(smallest_key);
}

__device__ __forceinline__ i64 chosen_of(i64 key_of_element, i64 smallest_key) {
    return key_of_element > smallest_key ? key_of_element : above_all_keys();         // line 7
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 64;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 4;  // per row
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 ROWS = 64;  // per block at a time
constexpr i32 CHUNKS = 2;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS
constexpr i32 BLOCKS_PER_SM = 3;  // at least, which limits the registers of a thread

// Combines one value of every thread of a row; all of them receive the result.
__device__ __forceinline__ i64 row_amin_i64(i64 value) {
#pragma unroll
    for (i32 mask = THREADS / 2; mask > 0; mask /= 2) value = amin_i64_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, BLOCKS_PER_SM)
fg_topk(const bf16* input_ptr, bf16* values_ptr, i64* indices_ptr, i64 input_dim0_extent) {
    const Index row_count = static_cast<Index>(input_dim0_extent);
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block_id()) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? COLUMNS : 0;

    // Phase 1 of 9: reduces the row to smallest_key; stores key_of_element for later phases.
    bf16 input_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<LANES>(input_raw[c], input_ptr, row * COLUMNS + column);
    }
    i64 key_of_element_kept[CHUNKS][LANES];
    i64 smallest_key_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) smallest_key_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float input[LANES];
        widen_vec(input_raw[c], input);
        i64 key_of_element[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            key_of_element[v] = key_of_element_of(input[v], column + v);
            smallest_key_of[v % PARTIALS] = amin_i64_combine(smallest_key_of[v % PARTIALS], key_of_element[v]);
            key_of_element_kept[c][v] = key_of_element[v];
        }
    }
#pragma unroll
    for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) {
            smallest_key_of[k] = amin_i64_combine(smallest_key_of[k], smallest_key_of[k + half]);
        }
    }
    const i64 smallest_key = row_amin_i64(smallest_key_of[0]);

    // Phases 2 to 8 of 9, one per turn: computes element_index, element; reduces the row to smallest_key_next; writes
    // indices, values.
    i64 smallest_key_each[8] = {smallest_key};
#pragma unroll
    for (i32 turn = 0; turn < 7; ++turn) {
        i64 element_index;
        float element;
        element_index_and_element_of(smallest_key_each[turn], element_index, element);
        i64 smallest_key_next_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) smallest_key_next_of[k] = amin_i64_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            const i64 (&key_of_element)[LANES] = key_of_element_kept[c];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                const i64 smallest_key_next_part = chosen_of(key_of_element[v], smallest_key_each[turn]);
                smallest_key_next_of[v % PARTIALS] = amin_i64_combine(smallest_key_next_of[v % PARTIALS],
                        smallest_key_next_part);
            }
        }
#pragma unroll
        for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) {
                smallest_key_next_of[k] = amin_i64_combine(smallest_key_next_of[k], smallest_key_next_of[k + half]);
            }
        }
        const i64 smallest_key_next = row_amin_i64(smallest_key_next_of[0]);
        if (thread == 0 && exists) {
            store_narrowed(indices_ptr, row * 8 + turn, element_index);
            store_narrowed(values_ptr, row * 8 + turn, element);
        }
        smallest_key_each[turn + 1] = smallest_key_next;
    }

    // Phase 9 of 9: computes element_index, element; writes indices, values.
    i64 element_index;
    float element;
    element_index_and_element_of(smallest_key_each[7], element_index, element);
    if (thread == 0 && exists) {
        store_narrowed(indices_ptr, row * 8 + 7, element_index);
        store_narrowed(values_ptr, row * 8 + 7, element);
    }
}
