// sample: row reduction, 3 phases, rows read once into shared memory, each split over a cluster of 2 blocks, emitted by
// fusegen for sm_90a.
// Grid min(logits_dim0, 66) * 2, block 672, 66608 bytes of shared memory: the shared memory of a cluster of 2 blocks
// holds a row and the next ones, which are prefetched.
// Reads logits_dim0 * 64010 bytes, writes logits_dim0 * 12.
// logits: bf16 [logits_dim0, 32000]; temperature: bf16 [logits_dim0, 1]; seeds: i64 [logits_dim0, 1]; token: i64
// [logits_dim0]; logprob: float [logits_dim0]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/cluster_arrive.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/cluster_push.cuh"
#include "../primitives/cluster_rank.cuh"
#include "../primitives/cluster_wait.cuh"
#include "../primitives/copy_async.cuh"
#include "../primitives/copy_async_commit.cuh"
#include "../primitives/copy_async_wait.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/load.i64.bf16.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait_cluster.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_load_vec.cuh"
#include "../primitives/shift_right.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/narrow.i64.float.cuh"
#include "../primitives/store.i64.float.cuh"
#include "../primitives/store_narrowed.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/wrap_add.cuh"
#include "../primitives/wrap_mul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// sample in fusegen/specs/selection.py; its def is line 1:
//   32: wide = wide if temperature is None else wide / torch.where(temperature >= _COLDEST, temperature, 1.0)
//   41: left = left - torch.where(temperature >= _COLDEST, waiting.log(), 0.0)
//   44: chosen = torch.where(places == token, logits.float(), -math.inf).amax(-1)
//   45: logprob = chosen - logits.float().logsumexp(-1)
// _exponential in fusegen/specs/selection.py; its def is line 1:
//    3: bits = _mixed(_mixed(seeds.long() + _GOLDEN) + (tokens + 1) * _GOLDEN)
//    4: return -torch.log1p(((bits >> 24 & (1 << 40) - 1).float() + 0.5) * -(2.0**-40))
// _mixed in fusegen/specs/selection.py; its def is line 1:
//    3: x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
//    4: x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
//    5: return x ^ (x >> 31 & (1 << 33) - 1)

__device__ __forceinline__ void max_f32_identity(float& values, i64& indices) {
    values = -infinity<float>();
    indices = 0x7FFFFFFFFFFFFFFFLL;
}

__device__ __forceinline__ void max_f32_combine(float a_values, i64 a_indices, float b_values, i64 b_indices,
        float& values, i64& indices) {
    const bool are_both = !(!(a_values <= b_values) && b_values == b_values) && b_indices < a_indices;
    const bool is_either = !(b_values <= a_values) && a_values == a_values || are_both;
    values = is_either ? b_values : a_values;
    indices = is_either ? b_indices : a_indices;
}

__device__ __forceinline__ void normalizer_f32_identity(float& peak, float& mass) {
    peak = -infinity<float>();
    mass = 0.0f;
}

// Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867
__device__ __forceinline__ void normalizer_f32_combine(float a_peak, float a_mass, float b_peak, float b_mass,
        float& peak, float& mass) {
    const float rescale = a_peak == b_peak ? 1.0f : expf(-fabsf(a_peak - b_peak));
    peak = maximum(a_peak, b_peak);
    mass = a_peak >= b_peak ? a_mass + b_mass * rescale : a_mass * rescale + b_mass;
}

__device__ __forceinline__ float amax_f32_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float amax_f32_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ void values_of_row_of(float temperature, i64 seeds, bool& is_at_least, float& chosen_2,
        i64& bits) {
    is_at_least = temperature >= 1e-30f;                                              // sample, line 32
    const i64 sum = wrap_add(seeds, -7046029254386353131LL);                          // _exponential, line 3
    const i64 bits_2 = sum ^ (shift_right(sum, 30LL) & 0x3FFFFFFFFLL);                // _mixed, line 3
    const i64 product = wrap_mul(bits_2, -4658895280553007687LL);
    const i64 bits_3 = product ^ (shift_right(product, 27LL) & 0x1FFFFFFFFFLL);       // _mixed, line 4
    const i64 product_2 = wrap_mul(bits_3, -7723592293110705685LL);
    chosen_2 = is_at_least ? temperature : 1.0f;                                      // sample, line 32
    bits = product_2 ^ (shift_right(product_2, 31LL) & 0x1FFFFFFFFLL);                // _mixed, line 5
}

__device__ __forceinline__ float left_of(bool is_at_least, float chosen_2, i64 bits, float logits, i64 coordinate) {
    const i64 sum = wrap_add(bits, wrap_mul(coordinate + 1LL, -7046029254386353131LL));  // _exponential, line 3
    const i64 bits_2 = sum ^ (shift_right(sum, 30LL) & 0x3FFFFFFFFLL);                // _mixed, line 3
    const i64 x = wrap_mul(bits_2, -4658895280553007687LL);
    const i64 bits_3 = x ^ (shift_right(x, 27LL) & 0x1FFFFFFFFFLL);                   // _mixed, line 4
    const i64 x_2 = wrap_mul(bits_3, -7723592293110705685LL);
    const i64 shifted = shift_right(x_2 ^ (shift_right(x_2, 31LL) & 0x1FFFFFFFFLL), 24LL);  // _exponential, line 4
    const float product = (static_cast<float>(shifted & 0xFFFFFFFFFFLL) + 0.5f) * -9.094947e-13f;
    return logits / chosen_2 - (is_at_least ? logf(-log1pf(product)) : 0.0f);         // sample, line 41
}

__device__ __forceinline__ float chosen_2_of(float logits, i64 place_indices, i64 coordinate) {
    return coordinate == place_indices ? logits : -infinity<float>();                 // sample, line 44
}

__device__ __forceinline__ float difference_of(float chosen, float normalizer_peak, float normalizer_mass) {
    return chosen - (normalizer_peak + logf(normalizer_mass));                        // sample, line 45
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 COLUMNS = 32000;  // of a row
constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 1344;  // per row
constexpr i32 CLUSTER = 2;  // blocks per row
constexpr i32 BLOCK = THREADS / CLUSTER;
constexpr i32 WARPS = 42;
constexpr i32 PARTIALS = 4;  // independent partial results per thread, which hide the latency of combining
constexpr i32 CHUNKS = 3;  // vectors per thread: CHUNKS * THREADS * LANES >= COLUMNS
constexpr i32 SLOTS = 6;  // pipeline stages: vectors per thread in shared memory
constexpr i32 AHEAD = SLOTS - CHUNKS;  // of them for later rows
constexpr i32 SLOT = BLOCK * LANES;  // elements between stages
constexpr i32 BLOCKS_PER_SM = 1;  // at least, so that a thread may take most registers
constexpr i32 PLACE_VALUES_OFFSET = 0;  // in shared memory, in bytes
constexpr i32 PLACE_INDICES_OFFSET = 336;
constexpr i32 NORMALIZER_PEAK_OFFSET = 1008;
constexpr i32 NORMALIZER_MASS_OFFSET = 1344;
constexpr i32 CHOSEN_OFFSET = 1680;
constexpr i32 LOGITS_OFFSET = 2048;
constexpr i32 ARRIVED_OFFSET = 66560;

// Index of this warp within the row.
__device__ __forceinline__ i32 warp_of_row() {
    return cluster_rank() * (WARPS / CLUSTER) + warp_id();
}

// Combines one value of every thread of a row; all of them receive the result.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at
// `arrived`.
__device__ __forceinline__ float row_amax_f32(float value, SharedArray<float> scratch, u64* arrived, u32 parity) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() < CLUSTER) cluster_push(scratch, warp_of_row(), value, lane_id(), arrived);
    mbarrier_wait_cluster(arrived, parity);
    if (thread_id() == 0) mbarrier_expect(arrived, WARPS * sizeof(float));  // for the row after next
    value = amax_f32_identity();
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) value = amax_f32_combine(value, shared_load(scratch, warp));
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Combines one state of every thread of a row; all of them receive the result.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at
// `arrived`.
__device__ __forceinline__ void row_max_f32(float& values, i64& indices, SharedArray<float> values_scratch,
        SharedArray<i64> indices_scratch, u64* arrived, u32 parity) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) {
        max_f32_combine(values, indices, shuffle_xor(values, mask), shuffle_xor(indices, mask), values, indices);
    }
    if (lane_id() < CLUSTER) {
        cluster_push(values_scratch, warp_of_row(), values, lane_id(), arrived);
        cluster_push(indices_scratch, warp_of_row(), indices, lane_id(), arrived);
    }
    mbarrier_wait_cluster(arrived, parity);
    if (thread_id() == 0) mbarrier_expect(arrived, WARPS * (sizeof(float) + sizeof(i64)));  // for the row after next
    max_f32_identity(values, indices);
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) {
        max_f32_combine(values, indices, shared_load(values_scratch, warp), shared_load(indices_scratch, warp), values,
                indices);
    }
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) {
        max_f32_combine(values, indices, shuffle_xor(values, mask), shuffle_xor(indices, mask), values, indices);
    }
}

// Combines one state of every thread of a row; all of them receive the result.
// Each warp sends its partial result to all blocks of the cluster, then waits until those of all warps have arrived at
// `arrived`.
__device__ __forceinline__ void row_normalizer_f32(float& peak, float& mass, SharedArray<float> peak_scratch,
        SharedArray<float> mass_scratch, u64* arrived, u32 parity) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) {
        normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    }
    if (lane_id() < CLUSTER) {
        cluster_push(peak_scratch, warp_of_row(), peak, lane_id(), arrived);
        cluster_push(mass_scratch, warp_of_row(), mass, lane_id(), arrived);
    }
    mbarrier_wait_cluster(arrived, parity);
    if (thread_id() == 0) mbarrier_expect(arrived, WARPS * (sizeof(float) + sizeof(float)));  // for the row after next
    normalizer_f32_identity(peak, mass);
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) {
        normalizer_f32_combine(peak, mass, shared_load(peak_scratch, warp), shared_load(mass_scratch, warp), peak,
                mass);
    }
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) {
        normalizer_f32_combine(peak, mass, shuffle_xor(peak, mask), shuffle_xor(mass, mask), peak, mass);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_sample(const bf16* logits_ptr, const bf16* temperature_ptr, const i64* seeds_ptr, i64* token_ptr,
        float* logprob_ptr, i64 logits_dim0_extent) {
    const Index row_count = static_cast<Index>(logits_dim0_extent);
    const i32 thread = cluster_rank() * BLOCK + thread_id();  // within the row
    // two mbarriers per reduction, for the bytes that warps send
    u64* const arrived = &*shared_array<u64>(ARRIVED_OFFSET);
    if (thread_id() == 0) {
        mbarrier_init(arrived, 1);
        mbarrier_init(arrived + 1, 1);
        mbarrier_init(arrived + 2, 1);
        mbarrier_init(arrived + 3, 1);
        mbarrier_init(arrived + 4, 1);
        mbarrier_init(arrived + 5, 1);
        mbarrier_init_fence();
        mbarrier_expect(arrived, WARPS * (sizeof(float) + sizeof(i64)));
        mbarrier_expect(arrived + 1, WARPS * (sizeof(float) + sizeof(i64)));
        mbarrier_expect(arrived + 2, WARPS * (sizeof(float) + sizeof(float)));
        mbarrier_expect(arrived + 3, WARPS * (sizeof(float) + sizeof(float)));
        mbarrier_expect(arrived + 4, WARPS * sizeof(float));
        mbarrier_expect(arrived + 5, WARPS * sizeof(float));
    }
    cluster_arrive();
    // This block's share of the rows.
    constexpr i32 PARTS = 66;  // at most: every block has rows
    const Index part = block_id() / CLUSTER;
    i32 turn = 0;  // rows alternate between two scratch buffers, so that one barrier per phase suffices
    u32 parity = 0;  // of the mbarrier phase: each mbarrier counts every other row
    auto logits_staged = shared_array<bf16>(LOGITS_OFFSET);
    i32 base = 0;  // stage of the row's first vector
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // consecutive; opaque: not kept in a register
    // Starts the copy of vector c of a row. A vector that does not exist still commits a group.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < COLUMNS) {
            copy_async<LANES>(logits_staged, slot * SLOT + thread_id() * LANES, logits_ptr, row * COLUMNS + column);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    cluster_wait();  // the other blocks have started and initialized their mbarriers
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 3: computes is_at_least, chosen_2, bits; reduces the row to place_values, place_indices,
        // normalizer_peak, normalizer_mass.
        const float temperature = widen(load(temperature_ptr, row));
        const i64 seeds = load(seeds_ptr, row);
        bool is_at_least;
        float chosen_2;
        i64 bits;
        values_of_row_of(temperature, seeds, is_at_least, chosen_2, bits);
        bf16 logits_raw[CHUNKS][LANES];
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            shared_load_vec(logits_raw[c], logits_staged, slot_of(c) * SLOT + thread_id() * LANES);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the stage is free
        }
        float place_values;
        i64 place_indices;
        max_f32_identity(place_values, place_indices);
        float normalizer_peak;
        float normalizer_mass;
        normalizer_f32_identity(normalizer_peak, normalizer_mass);
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) continue;
            float logits[LANES];
            widen_vec(logits_raw[c], logits);
            float place_values_part[LANES];
            i64 place_indices_part[LANES];
            float normalizer_peak_part[LANES];
            float normalizer_mass_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                place_values_part[v] = left_of(is_at_least, chosen_2, bits, logits[v], column + v);
                place_indices_part[v] = column + v;
                normalizer_peak_part[v] = logits[v];
                normalizer_mass_part[v] = 1.0f;
            }
#pragma unroll
            for (i32 half = LANES / 2; half > 0; half /= 2) {  // first within the vector
#pragma unroll
                for (i32 v = 0; v < half; ++v) {
                    max_f32_combine(place_values_part[v], place_indices_part[v], place_values_part[v + half],
                            place_indices_part[v + half], place_values_part[v], place_indices_part[v]);
                }
            }
            max_f32_combine(place_values, place_indices, place_values_part[0], place_indices_part[0], place_values,
                    place_indices);
#pragma unroll
            for (i32 half = LANES / 2; half > 0; half /= 2) {  // first within the vector
#pragma unroll
                for (i32 v = 0; v < half; ++v) {
                    normalizer_f32_combine(normalizer_peak_part[v], normalizer_mass_part[v],
                            normalizer_peak_part[v + half], normalizer_mass_part[v + half], normalizer_peak_part[v],
                            normalizer_mass_part[v]);
                }
            }
            normalizer_f32_combine(normalizer_peak, normalizer_mass, normalizer_peak_part[0], normalizer_mass_part[0],
                    normalizer_peak, normalizer_mass);
        }
        row_max_f32(place_values, place_indices, shared_array<float>(PLACE_VALUES_OFFSET) + turn * WARPS,
                shared_array<i64>(PLACE_INDICES_OFFSET) + turn * WARPS, arrived + turn, parity);
        row_normalizer_f32(normalizer_peak, normalizer_mass, shared_array<float>(NORMALIZER_PEAK_OFFSET) + turn
                * WARPS, shared_array<float>(NORMALIZER_MASS_OFFSET) + turn * WARPS, arrived + 2 + turn, parity);

        // Phase 2 of 3: reduces the row to chosen; writes token.
        float chosen_of[PARTIALS];
#pragma unroll
        for (i32 k = 0; k < PARTIALS; ++k) chosen_of[k] = amax_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= COLUMNS) continue;
            float logits[LANES];
            widen_vec(logits_raw[c], logits);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                const float chosen_part = chosen_2_of(logits[v], place_indices, column + v);
                chosen_of[v % PARTIALS] = amax_f32_combine(chosen_of[v % PARTIALS], chosen_part);
            }
        }
#pragma unroll
        for (i32 half = PARTIALS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) chosen_of[k] = amax_f32_combine(chosen_of[k], chosen_of[k + half]);
        }
        const float chosen = row_amax_f32(chosen_of[0], shared_array<float>(CHOSEN_OFFSET) + turn * WARPS, arrived + 4
                + turn, parity);
        if (thread == 0) {
            store_narrowed(token_ptr, row, place_indices);
        }

        // Phase 3 of 3: computes difference; writes logprob.
        const float difference = difference_of(chosen, normalizer_peak, normalizer_mass);
        if (thread == 0) {
            store_narrowed(logprob_ptr, row, difference);
        }
        turn ^= 1;
        parity ^= turn ^ 1;
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
}
