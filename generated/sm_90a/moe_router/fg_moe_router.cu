// moe_router: row reduction, 9 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid (logits_dim0 + 63) / 64, block 256: a row fits the registers of 4 threads, 16 elements per thread.
// Reads logits_dim0 * 128 bytes, writes logits_dim0 * 80.
// logits: bf16 [logits_dim0, 64]; weights: bf16 [logits_dim0, 8]; indices: i64 [logits_dim0, 8]; all contiguous,
// 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/above_all_keys.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/sort_key.cuh"
#include "../primitives/descending_key.cuh"
#include "../primitives/sorted_value.cuh"
#include "../primitives/descending_value.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/key_index.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.i64.float.cuh"
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
// moe_router in fusegen/specs/selection.py; its def is line 1:
//   30: values, indices = wide.topk(k)
//   31: weights = values.softmax(-1) if renormalize else (values - wide.logsumexp(-1, keepdim=True)).exp()
//   34: weights = (scale * weights).to(logits.dtype)

__device__ __forceinline__ i64 amin_i64_identity() {
    return 0x7FFFFFFFFFFFFFFFLL;
}

__device__ __forceinline__ i64 amin_i64_combine(i64 a, i64 b) {
    return minimum(a, b);
}

__device__ __forceinline__ i64 key_of_element_of(float logits, i64 coordinate) {
    return descending_key(logits, coordinate);                                        // line 30
}

__device__ __forceinline__ i64 element_index_of(i64 smallest_key) {
    return key_index(smallest_key);                                                   // line 30
}

__device__ __forceinline__ i64 chosen_of(i64 key_of_element, i64 smallest_key) {
    return key_of_element > smallest_key ? key_of_element : above_all_keys();         // line 30
}

__device__ __forceinline__ void values_of_row_of(i64 smallest_key, i64 smallest_key_2, i64 smallest_key_3,
        i64 smallest_key_4, i64 smallest_key_5, i64 smallest_key_6, i64 smallest_key_7, float scale,
        i64 smallest_key_8, float& weights, float& weights_2, float& weights_3, float& weights_4, float& weights_5,
        float& weights_6, float& weights_7, float& weights_8, i64& element_index_8) {
    const float element = descending_value(smallest_key);                             // line 30
    const float element_2 = descending_value(smallest_key_2);
    const float element_3 = descending_value(smallest_key_3);
    const float element_4 = descending_value(smallest_key_4);
    const float element_5 = descending_value(smallest_key_5);
    const float larger = maximum(maximum(maximum(element, element_2), element_3), element_4);  // line 31
    const float element_6 = descending_value(smallest_key_6);                         // line 30
    const float element_7 = descending_value(smallest_key_7);
    const float element_8 = descending_value(smallest_key_8);
    const float larger_2 = maximum(maximum(maximum(larger, element_5), element_6), element_7);  // line 31
    const float larger_3 = maximum(larger_2, element_8);
    const float exponential = fast_exp(element - larger_3);
    const float exponential_2 = fast_exp(element_2 - larger_3);
    const float exponential_3 = fast_exp(element_3 - larger_3);
    const float exponential_4 = fast_exp(element_4 - larger_3);
    const float exponential_5 = fast_exp(element_5 - larger_3);
    const float exponential_6 = fast_exp(element_6 - larger_3);
    const float sum = exponential + exponential_2 + exponential_3 + exponential_4 + exponential_5;
    const float exponential_7 = fast_exp(element_7 - larger_3);
    const float exponential_8 = fast_exp(element_8 - larger_3);
    const float sum_2 = sum + exponential_6 + exponential_7 + exponential_8;
    weights = scale * fast_divide(exponential, sum_2);                                // line 34
    weights_2 = scale * fast_divide(exponential_2, sum_2);
    weights_3 = scale * fast_divide(exponential_3, sum_2);
    weights_4 = scale * fast_divide(exponential_4, sum_2);
    weights_5 = scale * fast_divide(exponential_5, sum_2);
    weights_6 = scale * fast_divide(exponential_6, sum_2);
    weights_7 = scale * fast_divide(exponential_7, sum_2);
    weights_8 = scale * fast_divide(exponential_8, sum_2);
    element_index_8 = key_index(smallest_key_8);                                      // line 30
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
fg_moe_router(const bf16* logits_ptr, bf16* weights_ptr, i64* indices_ptr, i64 logits_dim0_extent, double scale) {
    const Index row_count = static_cast<Index>(logits_dim0_extent);
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block_id()) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? COLUMNS : 0;

    // Phase 1 of 9: reduces the row to smallest_key; stores key_of_element for later phases.
    bf16 logits_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<LANES>(logits_raw[c], logits_ptr, row * COLUMNS + column);
    }
    i64 key_of_element_kept[CHUNKS][LANES];
    i64 smallest_key_of[PARTIALS];
#pragma unroll
    for (i32 k = 0; k < PARTIALS; ++k) smallest_key_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float logits[LANES];
        widen_vec(logits_raw[c], logits);
        i64 key_of_element[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            key_of_element[v] = key_of_element_of(logits[v], column + v);
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

    // Phases 2 to 8 of 9, one per turn: computes element_index; reduces the row to smallest_key_next; writes indices.
    i64 smallest_key_each[8] = {smallest_key};
#pragma unroll
    for (i32 turn = 0; turn < 7; ++turn) {
        const i64 element_index = element_index_of(smallest_key_each[turn]);
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
        }
        smallest_key_each[turn + 1] = smallest_key_next;
    }

    // Phase 9 of 9: computes weights, weights_2, weights_3, weights_4, weights_5, weights_6, weights_7, weights_8,
    // element_index_8; writes weights, indices.
    float weights;
    float weights_2;
    float weights_3;
    float weights_4;
    float weights_5;
    float weights_6;
    float weights_7;
    float weights_8;
    i64 element_index_8;
    values_of_row_of(smallest_key_each[0], smallest_key_each[1], smallest_key_each[2], smallest_key_each[3],
            smallest_key_each[4], smallest_key_each[5], smallest_key_each[6], static_cast<float>(scale),
            smallest_key_each[7], weights, weights_2, weights_3, weights_4, weights_5, weights_6, weights_7, weights_8,
            element_index_8);
    if (thread == 0 && exists) {
        store_narrowed(weights_ptr, row * 8, weights);
        store_narrowed(weights_ptr, row * 8 + 1, weights_2);
        store_narrowed(weights_ptr, row * 8 + 2, weights_3);
        store_narrowed(weights_ptr, row * 8 + 3, weights_4);
        store_narrowed(weights_ptr, row * 8 + 4, weights_5);
        store_narrowed(weights_ptr, row * 8 + 5, weights_6);
        store_narrowed(weights_ptr, row * 8 + 6, weights_7);
        store_narrowed(weights_ptr, row * 8 + 7, weights_8);
        store_narrowed(indices_ptr, row * 8 + 7, element_index_8);
    }
}
