// sample: row reduction, 3 phases, rows read once into registers, each split over a cluster of 4 blocks, emitted by fusegen for sm_90a.
// Grid logits_dim0 * 4, block 256, 1312 bytes of shared memory: a row fits the registers of 1024 threads of a cluster of 4 blocks, 32 elements per thread.
// Reads logits_dim0 * 64010 bytes, writes logits_dim0 * 12.
#include "../primitives/types.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/cluster_arrive.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/cluster_push.cuh"
#include "../primitives/cluster_rank.cuh"
#include "../primitives/cluster_wait.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/exp_below.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/load.i64.bf16.float.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait_cluster.cuh"
#include "../primitives/narrow.i64.bf16.float.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shift_right.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/store.i64.bf16.float.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.i64.bf16.float.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/wrap_add.cuh"
#include "../primitives/wrap_mul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void max_f32_identity(float& values, i64& indices) {
    values = -bit_cast<float>(0x7f800000u);
    indices = 9223372036854775807LL;
}

__device__ __forceinline__ void max_f32_combine(float a_values, i64 a_indices, float b_values, i64 b_indices, float& values, i64& indices) {
    const bool logical_or_1 = !(b_values <= a_values) && a_values == a_values || !(!(a_values <= b_values) && b_values == b_values) && b_indices < a_indices;
    values = logical_or_1 ? b_values : a_values;
    indices = logical_or_1 ? b_indices : a_indices;
}

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

__device__ __forceinline__ void sample_row_0(float temperature, i64 seeds, bool& row_value, float& row_value_2, i64& row_value_3) {
    const bool ge_1 = temperature >= 1e-30f;                                          // line 47: wide = wide if temperature is None else wide / torch.where(temperature …
    const i64 add_1 = wrap_add(seeds, -7046029254386353131LL);                        // line 2: bits = _mixed(_mixed(seeds.long() + _GOLDEN) + (tokens + 1) * _GOLDEN)
    const i64 mul_1 = wrap_mul(add_1 ^ (shift_right(add_1, 30LL) & 17179869183LL), -4658895280553007687LL);  // line 2: x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    const i64 mul_2 = wrap_mul(mul_1 ^ (shift_right(mul_1, 27LL) & 137438953471LL), -7723592293110705685LL);  // line 3: x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    row_value = ge_1;                                                                 // line 47: wide = wide if temperature is None else wide / torch.where(temperature …
    row_value_2 = ge_1 ? temperature : 1.0f;
    row_value_3 = mul_2 ^ (shift_right(mul_2, 31LL) & 8589934591LL);                  // line 4: return x ^ (x >> 31 & (1 << 33) - 1)
}

__device__ __forceinline__ float sample_0(bool row_value, float row_value_2, i64 row_value_3, float logits, i64 coordinate) {
    const i64 add_1 = wrap_add(row_value_3, wrap_mul(wrap_add(coordinate, 1LL), -7046029254386353131LL));  // line 2: bits = _mixed(_mixed(seeds.long() + _GOLDEN) + (tokens + 1) * _GOLDEN)
    const i64 mul_1 = wrap_mul(add_1 ^ (shift_right(add_1, 30LL) & 17179869183LL), -4658895280553007687LL);  // line 2: x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    const i64 mul_2 = wrap_mul(mul_1 ^ (shift_right(mul_1, 27LL) & 137438953471LL), -7723592293110705685LL);  // line 3: x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    const i64 bitwise_and_1 = shift_right(mul_2 ^ (shift_right(mul_2, 31LL) & 8589934591LL), 24LL) & 1099511627775LL;  // line 3: return -torch.log1p(((bits >> 24 & (1 << 40) - 1).float() + 0.5) * -(2.…
    const float neg_1 = -log1pf((static_cast<float>(bitwise_and_1) + 0.5f) * -9.094947017729282e-13f);
    return logits / row_value_2 - (row_value ? logf(neg_1) : 0.0f);                   // line 56: left = left - torch.where(temperature >= _COLDEST, waiting.log(), 0.0)
}

__device__ __forceinline__ void sample_1(float logits, i64 place_indices, float largest, i64 coordinate, float& chosen_part, float& total_part) {
    chosen_part = coordinate == place_indices ? logits : -bit_cast<float>(0x7f800000u);  // line 59: chosen = torch.where(places == token, logits.float(), -math.inf).amax(-…
    total_part = exp_below(logits, largest);                                          // line 60: return token.squeeze(-1), chosen - logits.float().logsumexp(-1)
}

__device__ __forceinline__ float sample_row_2(float largest, float chosen, float total) {
    return chosen - (largest + logf(total));                                          // line 60: return token.squeeze(-1), chosen - logits.float().logsumexp(-1)
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 1024;  // per row
constexpr i32 CLUSTER = 4;  // blocks per row
constexpr i32 BLOCK = THREADS / CLUSTER;
constexpr i32 WARPS = 32;
constexpr i32 SUMS = 4;  // independent partial sums per thread, which hide the latency of additions
constexpr i32 CHUNKS = 4;  // vectors per thread

// Index of this warp within the row.
__device__ __forceinline__ i32 warp_of_row() {
    return cluster_rank() * (WARPS / CLUSTER) + warp_id();
}

// Combines one value of every thread of a row; all of them receive the result.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at `arrived`.
template <typename Scratch>
__device__ __forceinline__ float row_amax_f32(float value, Scratch scratch, u64* arrived) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() < CLUSTER) cluster_push(scratch, warp_of_row(), value, lane_id(), arrived);
    mbarrier_wait_cluster(arrived, 0);
    value = amax_f32_identity();
#pragma unroll
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) value = amax_f32_combine(value, shared_load(scratch, warp));
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Combines one value of every thread of a row; all of them receive the result.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at `arrived`.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32(float value, Scratch scratch, u64* arrived) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() < CLUSTER) cluster_push(scratch, warp_of_row(), value, lane_id(), arrived);
    mbarrier_wait_cluster(arrived, 0);
    value = sum_f32_identity();
#pragma unroll
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) value = sum_f32_combine(value, shared_load(scratch, warp));
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Combines one state of every thread of a row; all of them receive that of lane 0, since lanes may round in different orders.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at `arrived`.
template <typename Scratch0, typename Scratch1>
__device__ __forceinline__ void row_max_f32(float& values, i64& indices, Scratch0 values_scratch, Scratch1 indices_scratch, u64* arrived) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) max_f32_combine(values, indices, shuffle_xor(values, mask), shuffle_xor(indices, mask), values, indices);
    if (lane_id() < CLUSTER) {
        cluster_push(values_scratch, warp_of_row(), values, lane_id(), arrived);
        cluster_push(indices_scratch, warp_of_row(), indices, lane_id(), arrived);
    }
    mbarrier_wait_cluster(arrived, 0);
    max_f32_identity(values, indices);
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) {
        max_f32_combine(values, indices, shared_load(values_scratch, warp), shared_load(indices_scratch, warp), values, indices);
    }
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) max_f32_combine(values, indices, shuffle_xor(values, mask), shuffle_xor(indices, mask), values, indices);
    values = shuffle_xor(values, lane_id());
    indices = shuffle_xor(indices, lane_id());
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(256, 4)
fg_sample(const bf16* logits_ptr, const bf16* temperature_ptr, const i64* seeds_ptr, i64* out_0_ptr, float* out_1_ptr, i64 logits_dim0) {
    const Index column_count = 32000;
    const i32 thread = cluster_rank() * BLOCK + thread_id();  // within the row
    u64* const arrived = &*shared_array<u64>(1280);  // an mbarrier per reduction, for the bytes that warps send
    if (thread_id() == 0) {
        mbarrier_init(arrived + 0, 1);
        mbarrier_init(arrived + 1, 1);
        mbarrier_init(arrived + 2, 1);
        mbarrier_init(arrived + 3, 1);
        mbarrier_init_fence();
        mbarrier_expect(arrived + 0, WARPS * (sizeof(float) + sizeof(i64)));
        mbarrier_expect(arrived + 1, WARPS * sizeof(float));
        mbarrier_expect(arrived + 2, WARPS * sizeof(float));
        mbarrier_expect(arrived + 3, WARPS * sizeof(float));
    }
    cluster_arrive();
    const Index row = static_cast<Index>(block_id() / CLUSTER);

    // Phase 1 of 3: computes row_value, row_value_2, row_value_3; reduces each row to place_values, place_indices, largest.
    const float temperature = widen(load(temperature_ptr, row));
    const i64 seeds = widen(load(seeds_ptr, row));
    bool row_value;
    float row_value_2;
    i64 row_value_3;
    sample_row_0(temperature, seeds, row_value, row_value_2, row_value_3);
    bf16 logits_raw[CHUNKS][LANES];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        load_lanes<8>(logits_raw[c], logits_ptr, row * 32000 + column);
    }
    float place_values; i64 place_indices; max_f32_identity(place_values, place_indices);
    float largest_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float logits[LANES];
        widen_vec(logits_raw[c], logits);
        float place_values_part[LANES];
        i64 place_indices_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            place_values_part[v] = sample_0(row_value, row_value_2, row_value_3, logits[v], column + v);
            place_indices_part[v] = column + v;
            largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], logits[v]);
        }
#pragma unroll
        for (i32 half = LANES / 2; half > 0; half /= 2) {  // first within the vector
#pragma unroll
            for (i32 v = 0; v < half; ++v) max_f32_combine(place_values_part[v], place_indices_part[v], place_values_part[v + half], place_indices_part[v + half], place_values_part[v], place_indices_part[v]);
        }
        max_f32_combine(place_values, place_indices, place_values_part[0], place_indices_part[0], place_values, place_indices);
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
    }
    float largest = largest_of[0];
    cluster_wait();  // the other blocks have started and initialized their mbarriers
    row_max_f32(place_values, place_indices, shared_array<float>(0), shared_array<i64>(256), arrived + 0);
    largest = row_amax_f32(largest, shared_array<float>(512), arrived + 1);

    // Phase 2 of 3: reduces each row to chosen, total; writes out_0.
    float chosen_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) chosen_of[k] = amax_f32_identity();
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
    for (i32 c = 0; c < CHUNKS; ++c) {
        const Index column = (c * THREADS + thread) * LANES;
        if (column >= column_count) continue;
        float logits[LANES];
        widen_vec(logits_raw[c], logits);
        float chosen_part[LANES];
        float total_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            sample_1(logits[v], place_indices, largest, column + v, chosen_part[v], total_part[v]);
            chosen_of[v % SUMS] = amax_f32_combine(chosen_of[v % SUMS], chosen_part[v]);
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) chosen_of[k] = amax_f32_combine(chosen_of[k], chosen_of[k + half]);
    }
    float chosen = chosen_of[0];
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
    }
    float total = total_of[0];
    chosen = row_amax_f32(chosen, shared_array<float>(768), arrived + 2);
    total = row_sum_f32(total, shared_array<float>(1024), arrived + 3);
    if (thread == 0) {
        i64 narrowed;
        narrow(place_indices, narrowed);
        store(out_0_ptr, row, narrowed);
    }

    // Phase 3 of 3: computes row_value_4; writes out_1.
    const float row_value_4 = sample_row_2(largest, chosen, total);
    if (thread == 0) {
        float narrowed;
        narrow(row_value_4, narrowed);
        store(out_1_ptr, row, narrowed);
    }
}
