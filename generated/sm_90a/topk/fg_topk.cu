// topk: row reduction, 9 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid ((input_dim0 + 63) // 64), block 256: a row fits the registers of 4 threads, 16 elements per thread.
// Reads input_dim0 * 128 bytes, writes input_dim0 * 80.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/narrow.i64.bf16.cuh"
#include "../primitives/shift_right.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/sort_key.cuh"
#include "../primitives/sorted_value.cuh"
#include "../primitives/store.i64.bf16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// topk in selection.py; its first line is 0:
//    8: values, indices = input.topk(k, largest=largest)

__device__ __forceinline__ i64 amin_i64_identity() {
    return 9223372036854775807LL;
}

__device__ __forceinline__ i64 amin_i64_combine(i64 a, i64 b) {
    return minimum(a, b);
}

__device__ __forceinline__ void elements_of_topk(float input, i64 coordinate, i64& smallest_part, i64& bits) {
    const i64 bits_2 = sort_key(input, coordinate) ^ -4294967296LL;                   // line 8
    smallest_part = bits_2;
    bits = bits_2;
}

__device__ __forceinline__ void shifted_and_element_of_topk(i64 smallest, i64& shifted, float& element) {
    shifted = shift_right(smallest & 4294967295LL, 1LL);                              // line 8
    element = sorted_value(smallest ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_of_topk(i64 bits, i64 smallest) {
    return bits > smallest ? bits : 9187343248425746432LL;                            // line 8
}

__device__ __forceinline__ void shifted_2_and_element_2_of_topk(i64 smallest_2, i64& shifted_2, float& element_2) {
    shifted_2 = shift_right(smallest_2 & 4294967295LL, 1LL);                          // line 8
    element_2 = sorted_value(smallest_2 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_2_of_topk(i64 bits, i64 smallest_2) {
    return bits > smallest_2 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_3_and_element_3_of_topk(i64 smallest_3, i64& shifted_3, float& element_3) {
    shifted_3 = shift_right(smallest_3 & 4294967295LL, 1LL);                          // line 8
    element_3 = sorted_value(smallest_3 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_3_of_topk(i64 bits, i64 smallest_3) {
    return bits > smallest_3 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_4_and_element_4_of_topk(i64 smallest_4, i64& shifted_4, float& element_4) {
    shifted_4 = shift_right(smallest_4 & 4294967295LL, 1LL);                          // line 8
    element_4 = sorted_value(smallest_4 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_4_of_topk(i64 bits, i64 smallest_4) {
    return bits > smallest_4 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_5_and_element_5_of_topk(i64 smallest_5, i64& shifted_5, float& element_5) {
    shifted_5 = shift_right(smallest_5 & 4294967295LL, 1LL);                          // line 8
    element_5 = sorted_value(smallest_5 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_5_of_topk(i64 bits, i64 smallest_5) {
    return bits > smallest_5 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_6_and_element_6_of_topk(i64 smallest_6, i64& shifted_6, float& element_6) {
    shifted_6 = shift_right(smallest_6 & 4294967295LL, 1LL);                          // line 8
    element_6 = sorted_value(smallest_6 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_6_of_topk(i64 bits, i64 smallest_6) {
    return bits > smallest_6 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_7_and_element_7_of_topk(i64 smallest_7, i64& shifted_7, float& element_7) {
    shifted_7 = shift_right(smallest_7 & 4294967295LL, 1LL);                          // line 8
    element_7 = sorted_value(smallest_7 ^ -4294967296LL);
}

__device__ __forceinline__ i64 chosen_7_of_topk(i64 bits, i64 smallest_7) {
    return bits > smallest_7 ? bits : 9187343248425746432LL;                          // line 8
}

__device__ __forceinline__ void shifted_8_and_element_8_of_topk(i64 smallest_8, i64& shifted_8, float& element_8) {
    shifted_8 = shift_right(smallest_8 & 4294967295LL, 1LL);                          // line 8
    element_8 = sorted_value(smallest_8 ^ -4294967296LL);
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

extern "C" __global__ void __launch_bounds__(256, 4)
fg_topk(const bf16* input_ptr, i64* out_1_ptr, bf16* out_0_ptr, i64 input_dim0) {
    const Index row_count = input_dim0;
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
    for (i32 k = 0; k < SUMS; ++k) smallest_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float input[LANES];
        widen_vec(input_raw[c], input);
        i64 smallest_part[LANES];
        i64 bits[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            elements_of_topk(input[v], column + v, smallest_part[v], bits[v]);
            smallest_of[v % SUMS] = amin_i64_combine(smallest_of[v % SUMS], smallest_part[v]);
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

    // Phase 2 of 9: computes shifted, element; reduces each row to smallest_2; writes out_1, out_0.
    i64 shifted;
    float element;
    shifted_and_element_of_topk(smallest, shifted, element);
    i64 smallest_2_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_2_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_2_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_2_part[v] = chosen_of_topk(bits[v], smallest);
            smallest_2_of[v % SUMS] = amin_i64_combine(smallest_2_of[v % SUMS], smallest_2_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_2_of[k] = amin_i64_combine(smallest_2_of[k], smallest_2_of[k + half]);
    }
    i64 smallest_2 = smallest_2_of[0];
    smallest_2 = row_amin_i64(smallest_2);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted, narrowed);
        store(out_1_ptr, row * 8, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element, narrowed);
        store(out_0_ptr, row * 8, narrowed);
    }

    // Phase 3 of 9: computes shifted_2, element_2; reduces each row to smallest_3; writes out_1, out_0.
    i64 shifted_2;
    float element_2;
    shifted_2_and_element_2_of_topk(smallest_2, shifted_2, element_2);
    i64 smallest_3_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_3_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_3_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_3_part[v] = chosen_2_of_topk(bits[v], smallest_2);
            smallest_3_of[v % SUMS] = amin_i64_combine(smallest_3_of[v % SUMS], smallest_3_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_3_of[k] = amin_i64_combine(smallest_3_of[k], smallest_3_of[k + half]);
    }
    i64 smallest_3 = smallest_3_of[0];
    smallest_3 = row_amin_i64(smallest_3);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_2, narrowed);
        store(out_1_ptr, row * 8 + 1, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_2, narrowed);
        store(out_0_ptr, row * 8 + 1, narrowed);
    }

    // Phase 4 of 9: computes shifted_3, element_3; reduces each row to smallest_4; writes out_1, out_0.
    i64 shifted_3;
    float element_3;
    shifted_3_and_element_3_of_topk(smallest_3, shifted_3, element_3);
    i64 smallest_4_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_4_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_4_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_4_part[v] = chosen_3_of_topk(bits[v], smallest_3);
            smallest_4_of[v % SUMS] = amin_i64_combine(smallest_4_of[v % SUMS], smallest_4_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_4_of[k] = amin_i64_combine(smallest_4_of[k], smallest_4_of[k + half]);
    }
    i64 smallest_4 = smallest_4_of[0];
    smallest_4 = row_amin_i64(smallest_4);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_3, narrowed);
        store(out_1_ptr, row * 8 + 2, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_3, narrowed);
        store(out_0_ptr, row * 8 + 2, narrowed);
    }

    // Phase 5 of 9: computes shifted_4, element_4; reduces each row to smallest_5; writes out_1, out_0.
    i64 shifted_4;
    float element_4;
    shifted_4_and_element_4_of_topk(smallest_4, shifted_4, element_4);
    i64 smallest_5_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_5_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_5_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_5_part[v] = chosen_4_of_topk(bits[v], smallest_4);
            smallest_5_of[v % SUMS] = amin_i64_combine(smallest_5_of[v % SUMS], smallest_5_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_5_of[k] = amin_i64_combine(smallest_5_of[k], smallest_5_of[k + half]);
    }
    i64 smallest_5 = smallest_5_of[0];
    smallest_5 = row_amin_i64(smallest_5);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_4, narrowed);
        store(out_1_ptr, row * 8 + 3, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_4, narrowed);
        store(out_0_ptr, row * 8 + 3, narrowed);
    }

    // Phase 6 of 9: computes shifted_5, element_5; reduces each row to smallest_6; writes out_1, out_0.
    i64 shifted_5;
    float element_5;
    shifted_5_and_element_5_of_topk(smallest_5, shifted_5, element_5);
    i64 smallest_6_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_6_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_6_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_6_part[v] = chosen_5_of_topk(bits[v], smallest_5);
            smallest_6_of[v % SUMS] = amin_i64_combine(smallest_6_of[v % SUMS], smallest_6_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_6_of[k] = amin_i64_combine(smallest_6_of[k], smallest_6_of[k + half]);
    }
    i64 smallest_6 = smallest_6_of[0];
    smallest_6 = row_amin_i64(smallest_6);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_5, narrowed);
        store(out_1_ptr, row * 8 + 4, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_5, narrowed);
        store(out_0_ptr, row * 8 + 4, narrowed);
    }

    // Phase 7 of 9: computes shifted_6, element_6; reduces each row to smallest_7; writes out_1, out_0.
    i64 shifted_6;
    float element_6;
    shifted_6_and_element_6_of_topk(smallest_6, shifted_6, element_6);
    i64 smallest_7_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_7_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_7_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_7_part[v] = chosen_6_of_topk(bits[v], smallest_6);
            smallest_7_of[v % SUMS] = amin_i64_combine(smallest_7_of[v % SUMS], smallest_7_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_7_of[k] = amin_i64_combine(smallest_7_of[k], smallest_7_of[k + half]);
    }
    i64 smallest_7 = smallest_7_of[0];
    smallest_7 = row_amin_i64(smallest_7);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_6, narrowed);
        store(out_1_ptr, row * 8 + 5, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_6, narrowed);
        store(out_0_ptr, row * 8 + 5, narrowed);
    }

    // Phase 8 of 9: computes shifted_7, element_7; reduces each row to smallest_8; writes out_1, out_0.
    i64 shifted_7;
    float element_7;
    shifted_7_and_element_7_of_topk(smallest_7, shifted_7, element_7);
    i64 smallest_8_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_8_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bits)[LANES] = bits_kept[c];
        i64 smallest_8_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_8_part[v] = chosen_7_of_topk(bits[v], smallest_7);
            smallest_8_of[v % SUMS] = amin_i64_combine(smallest_8_of[v % SUMS], smallest_8_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_8_of[k] = amin_i64_combine(smallest_8_of[k], smallest_8_of[k + half]);
    }
    i64 smallest_8 = smallest_8_of[0];
    smallest_8 = row_amin_i64(smallest_8);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_7, narrowed);
        store(out_1_ptr, row * 8 + 6, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_7, narrowed);
        store(out_0_ptr, row * 8 + 6, narrowed);
    }

    // Phase 9 of 9: computes shifted_8, element_8; writes out_1, out_0.
    i64 shifted_8;
    float element_8;
    shifted_8_and_element_8_of_topk(smallest_8, shifted_8, element_8);
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(shifted_8, narrowed);
        store(out_1_ptr, row * 8 + 7, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(element_8, narrowed);
        store(out_0_ptr, row * 8 + 7, narrowed);
    }
}
