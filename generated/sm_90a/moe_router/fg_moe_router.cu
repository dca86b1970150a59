// moe_router: row reduction, 9 phases, rows read once into registers, emitted by fusegen for sm_90a.
// Grid ((logits_dim0 + 63) // 64), block 256: a row fits the registers of 4 threads, 16 elements per thread.
// Reads logits_dim0 * 128 bytes, writes logits_dim0 * 80.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.i64.float.cuh"
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
__device__ __forceinline__ i64 amin_i64_identity() {
    return 9223372036854775807LL;
}

__device__ __forceinline__ i64 amin_i64_combine(i64 a, i64 b) {
    return minimum(a, b);
}

__device__ __forceinline__ void moe_router_0(float logits, i64 coordinate, i64& smallest_part, i64& bitwise_xor_value) {
    const i64 bitwise_xor_1 = sort_key(logits, coordinate) ^ -4294967296LL;           // line 42: values, indices = wide.topk(k)
    smallest_part = bitwise_xor_1;
    bitwise_xor_value = bitwise_xor_1;
}

__device__ __forceinline__ i64 moe_router_row_1(i64 smallest) {
    return shift_right(smallest & 4294967295LL, 1LL);                                 // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_1(i64 bitwise_xor_value, i64 smallest) {
    return bitwise_xor_value > smallest ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_2(i64 smallest_2) {
    return shift_right(smallest_2 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_2(i64 bitwise_xor_value, i64 smallest_2) {
    return bitwise_xor_value > smallest_2 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_3(i64 smallest_3) {
    return shift_right(smallest_3 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_3(i64 bitwise_xor_value, i64 smallest_3) {
    return bitwise_xor_value > smallest_3 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_4(i64 smallest_4) {
    return shift_right(smallest_4 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_4(i64 bitwise_xor_value, i64 smallest_4) {
    return bitwise_xor_value > smallest_4 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_5(i64 smallest_5) {
    return shift_right(smallest_5 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_5(i64 bitwise_xor_value, i64 smallest_5) {
    return bitwise_xor_value > smallest_5 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_6(i64 smallest_6) {
    return shift_right(smallest_6 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_6(i64 bitwise_xor_value, i64 smallest_6) {
    return bitwise_xor_value > smallest_6 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_row_7(i64 smallest_7) {
    return shift_right(smallest_7 & 4294967295LL, 1LL);                               // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ i64 moe_router_7(i64 bitwise_xor_value, i64 smallest_7) {
    return bitwise_xor_value > smallest_7 ? bitwise_xor_value : 9187343248425746432LL;  // line 42: values, indices = wide.topk(k)
}

__device__ __forceinline__ void moe_router_row_8(i64 smallest, i64 smallest_2, i64 smallest_3, i64 smallest_4, i64 smallest_5, i64 smallest_6, i64 smallest_7, float scale, i64 smallest_8, float& row_value_8, float& row_value_9, float& row_value_10, float& row_value_11, float& row_value_12, float& row_value_13, float& row_value_14, float& row_value_15, i64& row_value_16) {
    const float sorted_value_1 = sorted_value(smallest ^ -4294967296LL);              // line 42: values, indices = wide.topk(k)
    const float sorted_value_2 = sorted_value(smallest_2 ^ -4294967296LL);
    const float sorted_value_3 = sorted_value(smallest_3 ^ -4294967296LL);
    const float sorted_value_4 = sorted_value(smallest_4 ^ -4294967296LL);
    const float maximum_1 = maximum(maximum(maximum(sorted_value_1, sorted_value_2), sorted_value_3), sorted_value_4);  // line 43: weights = values.softmax(-1) if renormalize else (values - wide.logsume…
    const float sorted_value_5 = sorted_value(smallest_5 ^ -4294967296LL);            // line 42: values, indices = wide.topk(k)
    const float sorted_value_6 = sorted_value(smallest_6 ^ -4294967296LL);
    const float sorted_value_7 = sorted_value(smallest_7 ^ -4294967296LL);
    const float maximum_2 = maximum(maximum(maximum(maximum_1, sorted_value_5), sorted_value_6), sorted_value_7);  // line 43: weights = values.softmax(-1) if renormalize else (values - wide.logsume…
    const float sorted_value_8 = sorted_value(smallest_8 ^ -4294967296LL);            // line 42: values, indices = wide.topk(k)
    const float maximum_3 = maximum(maximum_2, sorted_value_8);                       // line 43: weights = values.softmax(-1) if renormalize else (values - wide.logsume…
    const float exp_1 = fast_exp(sorted_value_1 - maximum_3);
    const float exp_2 = fast_exp(sorted_value_2 - maximum_3);
    const float exp_3 = fast_exp(sorted_value_3 - maximum_3);
    const float exp_4 = fast_exp(sorted_value_4 - maximum_3);
    const float exp_5 = fast_exp(sorted_value_5 - maximum_3);
    const float exp_6 = fast_exp(sorted_value_6 - maximum_3);
    const float exp_7 = fast_exp(sorted_value_7 - maximum_3);
    const float exp_8 = fast_exp(sorted_value_8 - maximum_3);
    const float add_1 = exp_1 + exp_2 + exp_3 + exp_4 + exp_5 + exp_6 + exp_7 + exp_8;
    row_value_8 = scale * fast_divide(exp_1, add_1);                                  // line 46: return (scale * weights).to(logits.dtype), indices
    row_value_9 = scale * fast_divide(exp_2, add_1);
    row_value_10 = scale * fast_divide(exp_3, add_1);
    row_value_11 = scale * fast_divide(exp_4, add_1);
    row_value_12 = scale * fast_divide(exp_5, add_1);
    row_value_13 = scale * fast_divide(exp_6, add_1);
    row_value_14 = scale * fast_divide(exp_7, add_1);
    row_value_15 = scale * fast_divide(exp_8, add_1);
    row_value_16 = shift_right(smallest_8 & 4294967295LL, 1LL);                       // line 42: values, indices = wide.topk(k)
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
fg_moe_router(const bf16* logits_ptr, i64* out_1_ptr, bf16* out_0_ptr, i64 logits_dim0, double scale) {
    const Index row_count = logits_dim0;
    const i32 thread = thread_id() % THREADS;
    const i32 group = thread_id() / THREADS;  // row within the block
    // Threads without a row use the last row, with no columns.
    const Index own = static_cast<Index>(block_id()) * ROWS + group;
    const bool exists = own < row_count;
    const Index row = exists ? own : row_count - 1;
    const Index column_count = exists ? 64 : 0;

    // Phase 1 of 9: reduces each row to smallest; stores bitwise_xor_value for later phases.
    bf16 logits_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<8>(logits_raw[c], logits_ptr, row * 64 + column);
    }
    i64 bitwise_xor_value_kept[CHUNKS][LANES];
    i64 smallest_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float logits[LANES];
        widen_vec(logits_raw[c], logits);
        i64 smallest_part[LANES];
        i64 bitwise_xor_value[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            moe_router_0(logits[v], column + v, smallest_part[v], bitwise_xor_value[v]);
            smallest_of[v % SUMS] = amin_i64_combine(smallest_of[v % SUMS], smallest_part[v]);
            bitwise_xor_value_kept[c][v] = bitwise_xor_value[v];
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) smallest_of[k] = amin_i64_combine(smallest_of[k], smallest_of[k + half]);
    }
    i64 smallest = smallest_of[0];
    smallest = row_amin_i64(smallest);

    // Phase 2 of 9: computes row_value; reduces each row to smallest_2; writes out_1.
    const i64 row_value = moe_router_row_1(smallest);
    i64 smallest_2_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_2_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_2_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_2_part[v] = moe_router_1(bitwise_xor_value[v], smallest);
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
        narrow(row_value, narrowed);
        store(out_1_ptr, row * 8, narrowed);
    }

    // Phase 3 of 9: computes row_value_2; reduces each row to smallest_3; writes out_1.
    const i64 row_value_2 = moe_router_row_2(smallest_2);
    i64 smallest_3_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_3_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_3_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_3_part[v] = moe_router_2(bitwise_xor_value[v], smallest_2);
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
        narrow(row_value_2, narrowed);
        store(out_1_ptr, row * 8 + 1, narrowed);
    }

    // Phase 4 of 9: computes row_value_3; reduces each row to smallest_4; writes out_1.
    const i64 row_value_3 = moe_router_row_3(smallest_3);
    i64 smallest_4_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_4_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_4_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_4_part[v] = moe_router_3(bitwise_xor_value[v], smallest_3);
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
        narrow(row_value_3, narrowed);
        store(out_1_ptr, row * 8 + 2, narrowed);
    }

    // Phase 5 of 9: computes row_value_4; reduces each row to smallest_5; writes out_1.
    const i64 row_value_4 = moe_router_row_4(smallest_4);
    i64 smallest_5_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_5_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_5_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_5_part[v] = moe_router_4(bitwise_xor_value[v], smallest_4);
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
        narrow(row_value_4, narrowed);
        store(out_1_ptr, row * 8 + 3, narrowed);
    }

    // Phase 6 of 9: computes row_value_5; reduces each row to smallest_6; writes out_1.
    const i64 row_value_5 = moe_router_row_5(smallest_5);
    i64 smallest_6_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_6_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_6_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_6_part[v] = moe_router_5(bitwise_xor_value[v], smallest_5);
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
        narrow(row_value_5, narrowed);
        store(out_1_ptr, row * 8 + 4, narrowed);
    }

    // Phase 7 of 9: computes row_value_6; reduces each row to smallest_7; writes out_1.
    const i64 row_value_6 = moe_router_row_6(smallest_6);
    i64 smallest_7_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_7_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_7_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_7_part[v] = moe_router_6(bitwise_xor_value[v], smallest_6);
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
        narrow(row_value_6, narrowed);
        store(out_1_ptr, row * 8 + 5, narrowed);
    }

    // Phase 8 of 9: computes row_value_7; reduces each row to smallest_8; writes out_1.
    const i64 row_value_7 = moe_router_row_7(smallest_7);
    i64 smallest_8_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) smallest_8_of[k] = amin_i64_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        const i64 (&bitwise_xor_value)[LANES] = bitwise_xor_value_kept[c];
        i64 smallest_8_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            smallest_8_part[v] = moe_router_7(bitwise_xor_value[v], smallest_7);
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
        narrow(row_value_7, narrowed);
        store(out_1_ptr, row * 8 + 6, narrowed);
    }

    // Phase 9 of 9: computes row_value_8, row_value_9, row_value_10, row_value_11, row_value_12, row_value_13, row_value_14, row_value_15, row_value_16; writes out_0, out_1.
    float row_value_8;
    float row_value_9;
    float row_value_10;
    float row_value_11;
    float row_value_12;
    float row_value_13;
    float row_value_14;
    float row_value_15;
    i64 row_value_16;
    moe_router_row_8(smallest, smallest_2, smallest_3, smallest_4, smallest_5, smallest_6, smallest_7, scale, smallest_8, row_value_8, row_value_9, row_value_10, row_value_11, row_value_12, row_value_13, row_value_14, row_value_15, row_value_16);
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_8, narrowed);
        store(out_0_ptr, row * 8, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_9, narrowed);
        store(out_0_ptr, row * 8 + 1, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_10, narrowed);
        store(out_0_ptr, row * 8 + 2, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_11, narrowed);
        store(out_0_ptr, row * 8 + 3, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_12, narrowed);
        store(out_0_ptr, row * 8 + 4, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_13, narrowed);
        store(out_0_ptr, row * 8 + 5, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_14, narrowed);
        store(out_0_ptr, row * 8 + 6, narrowed);
    }
    if (thread == 0 && exists) {
        bf16 narrowed;
        narrow(row_value_15, narrowed);
        store(out_0_ptr, row * 8 + 7, narrowed);
    }
    if (thread == 0 && exists) {
        i64 narrowed;
        narrow(row_value_16, narrowed);
        store(out_1_ptr, row * 8 + 7, narrowed);
    }
}
