// cached_attention: attention, few queries, emitted by fusegen for sm_90a.
// Grid 128, block 160, 101376 bytes of shared memory.
// Reads k_cache_dim2 * 65536 + 131200 bytes, writes 131072.
// q, out: bf16 [16, 32, 1, 128]; k_cache, v_cache: bf16 [16, 8, k_cache_dim2, 128]; lengths: i64 [16]; all contiguous,
// 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.maps.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/cvt_bf16x2.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp2.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/ldmatrix.cuh"
#include "../primitives/ldmatrix_transposed.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/mbarrier_arrive.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/mma_m16n8k16_bf16.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/shared_load.cuh"
#include "../primitives/shared_store.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/store_vec.4.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/tma_load_4d.cuh"
#include "../primitives/tma_prefetch_map.cuh"
#include "../primitives/warp_id.cuh"
#include "../primitives/warp_sync.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// seen in fusegen/specs/attention.py; its def is line 1:
//   10: found = key <= query if is_causal else None
// with_cache in fusegen/specs/attention.py; its def is line 1:
//   28: scores = scores if visible is None else torch.where(visible, scores, -math.inf)
//   32: return torch.where(position >= 0, result, 0.0).to(v.dtype)
// weights_of in fusegen/specs/attention.py; its def is line 1:
//    4: return torch.softmax(scores, -1)

// Operands that the math loads.
struct Operands {
    i32 k_cache_dim2;
    i64 lengths;
};

__device__ __forceinline__ float cached_attention_score(float product, i64 key, i64 lengths, i64 k_cache_dim2) {
    const bool found = key < minimum(maximum(lengths, 0LL), k_cache_dim2);            // seen, line 10
    return found ? product : -infinity<float>();                                      // with_cache, line 28
}

// Scores two neighbouring keys.
__device__ __forceinline__ void score(const Operands& operands, const float (&product)[2], i32 /*batch*/, i32 /*head*/,
                                      i32 /*query*/, i32 key, float (&s)[2]) {
#pragma unroll
    for (i32 v = 0; v < 2; ++v) {
        s[v] = cached_attention_score(product[v], key + v, operands.lengths, operands.k_cache_dim2);
    }
}

__device__ __forceinline__ float peak_identity() {
    return -infinity<float>();
}

__device__ __forceinline__ float peak_combine(float a, float b) {
    return maximum(a, b);
}

__device__ __forceinline__ float mass_combine(float a, float b) {
    return a + b;
}

// The row max; 0 while there is none.
__device__ __forceinline__ float anchor(float peak) {
    return peak == -infinity<float>() ? 0.0f : peak;                                  // weights_of, line 4
}

// The weight of a score relative to the anchor, at most 1; that of an old row max rescales older weights. The number is
// log2(e) times 0.08838835, which scales all scores.
__device__ __forceinline__ float weight(float s, float anchor) {
    return fast_exp2((s - anchor) * 0.12751743f);                                     // weights_of, line 4
}

__device__ __forceinline__ float cached_attention_finish(float total, i64 lengths, i64 k_cache_dim2, float mass) {
    const bool is_greater = minimum(maximum(lengths, 0LL), k_cache_dim2) > 0LL;       // with_cache, line 32
    return is_greater ? total * fast_divide(1.0f, mass) : 0.0f;
}

// Finishes two neighbouring channels of a query.
__device__ __forceinline__ void finish(const Operands& operands, const float (&total)[2], float mass, i32 /*batch*/,
                                       i32 /*head*/, i32 /*query*/, i32 /*channel*/, bf16 (&out)[2]) {
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) {
        result[v] = cached_attention_finish(total[v], operands.lengths, operands.k_cache_dim2, mass);
    }
    narrow_vec(result, out);
}

// The offset of a query's first channel in the output.
__device__ __forceinline__ i64 out_offset(const Operands& /*operands*/, i32 batch, i32 head, i32 query) {
    return head * 128 + query * 128 + batch * 4096;
}

// An upper bound of the keys that a query attends to; later ones have no weight.
__device__ __forceinline__ i64 seen_keys(const Operands& operands, i32 /*batch*/, i32 /*head*/, i32 /*query*/) {
    return min(max(i64(operands.lengths), i64(0)), i64(operands.k_cache_dim2));
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 HEAD_DIM = 128;  // of queries and keys
constexpr i32 VALUE_DIM = 128;
constexpr i32 SHARING = 4;  // query heads of a GQA group
constexpr i32 QUERIES = 1;  // of each of these heads in a tile
constexpr i32 ROWS = SHARING * QUERIES;  // of a tile: head by head
constexpr i32 SPLITS = 1;  // blocks that share the keys of a tile
constexpr i32 TILE_K = 64;
constexpr i32 STAGES = 3;  // of keys, and the same number of values
constexpr i32 BLOCKS_PER_SM = 2;

constexpr i32 SLAB = 16;  // M and K of the mma
constexpr i32 OCTET = 8;  // N of the mma; units of 16 bytes in a line
constexpr i32 ROW_SLABS = (ROWS + SLAB - 1) / SLAB, KEY_SLABS = TILE_K / SLAB;
// Halves of a slab of rows that hold queries. The values that the mma computes for the other half are never read.
constexpr i32 HALVES = ROWS > OCTET ? 2 : 1;
constexpr i32 WARPS = ROW_SLABS * KEY_SLABS;  // consumer warps
constexpr i32 THREADS = 32 * (WARPS + 1);
constexpr i32 LINE = 64;  // elements of a 128-byte line of the swizzle
constexpr i32 LINE_BYTES = 128, UNIT_BYTES = 16;
constexpr i32 LINES = (HEAD_DIM + LINE - 1) / LINE;  // the last one is padded with zeros
constexpr i32 VALUE_LINES = (VALUE_DIM + LINE - 1) / LINE;
constexpr i32 STEPS = (HEAD_DIM + SLAB - 1) / SLAB;  // instructions along the channels of queries and keys
constexpr i32 VALUE_SLABS = (VALUE_DIM + SLAB - 1) / SLAB;
constexpr i32 PITCH = VALUE_SLABS * SLAB + OCTET;  // of a row of sums, padded against bank conflicts

// Shared memory of a block while it reads keys. Tiles are columns of 128-byte lines, the layout of TMA.
struct alignas(1024) SharedMemory {
    bf16 q[LINES][(ROWS + OCTET - 1) / OCTET * OCTET][LINE];
    bf16 k[STAGES][LINES][TILE_K][LINE];
    bf16 v[STAGES][VALUE_LINES][TILE_K][LINE];
    u64 q_full;
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[STAGES], v_empty[STAGES];
};

// Afterwards, the memory holds the sums of each warp, with their statistics.
constexpr i32 WARP_SUMS = SLAB * PITCH;
constexpr i32 PEAKS = 4 * WARPS * WARP_SUMS, MASSES = PEAKS + 4 * WARPS * SLAB;
static_assert(sizeof(SharedMemory) <= 101376 && MASSES + 4 * WARPS * SLAB <= 101376,
        "the launch reserves what the kernel uses");

// Position in a ring of stages. The phase flips at each turn: consumers wait for `phase`, the producer for its
// opposite.
struct Cursor {
    i32 stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The queries of a tile, which share a head of keys.
struct Work {
    i32 batch, kv_head, query;

    __device__ __forceinline__ Work(i32 index, i32 kv_heads, i32 query_tiles)
        : batch(index / query_tiles / kv_heads), kv_head(index / query_tiles % kv_heads),
                query(index % query_tiles * QUERIES) {}

    __device__ __forceinline__ i32 head_of(i32 row) const { return kv_head * SHARING + min(row, ROWS - 1) / QUERIES; }

    // Rows past the last query are computed like it and never stored.
    __device__ __forceinline__ i32 query_of(i32 row, i32 queries) const {
        return min(query + row % QUERIES, queries - 1);
    }
};

// Statistics of a thread's two rows. `mass`, the row sum, covers this thread's keys only until the rows are finished.
struct Rows {
    float peak[2] = {peak_identity(), peak_identity()};
    float mass[2] = {0.0f, 0.0f};
};

// The address of a unit of eight channels of a line in a tile.
template <i32 TILE_ROWS>
__device__ __forceinline__ u32 unit_address(u32 tile, i32 row, i32 unit) {
    const i32 line = unit / OCTET, within = unit % OCTET ^ row % OCTET;
    return tile + (line * TILE_ROWS + row) * LINE_BYTES + within * UNIT_BYTES;
}

template <i32 LINES_OF_TILE, i32 ROWS_OF_TILE>
__device__ __forceinline__ void load_tile(bf16 (&tile)[LINES_OF_TILE][ROWS_OF_TILE][LINE], u64& full,
                                          const TensorMap& map, i32 batch, i32 head, i32 first, i32 rows) {
    mbarrier_expect(&full, LINES_OF_TILE * rows * LINE_BYTES);
#pragma unroll
    for (i32 line = 0; line < LINES_OF_TILE; ++line) {
        tma_load_4d(tile[line], map, &full, line * LINE, first, head, batch);
    }
}

__device__ __forceinline__ void barriers_init(SharedMemory& shared) {
    mbarrier_init(&shared.q_full, 1);
    for (i32 stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(&shared.k_full[stage], 1);
        mbarrier_init(&shared.v_full[stage], 1);
        mbarrier_init(&shared.k_empty[stage], WARPS);
        mbarrier_init(&shared.v_empty[stage], WARPS);
    }
    mbarrier_init_fence();
}

// Loads the tiles of this block in the order of the consumers.
__device__ __forceinline__ void produce(SharedMemory& shared, const TensorMap& q_map, const TensorMap& k_map,
                                        const TensorMap& v_map, const Work& work, i32 first_tile, i32 key_tiles) {
    load_tile(shared.q, shared.q_full, q_map, work.batch, work.kv_head * SHARING, work.query, ROWS);
    Cursor ring;
    for (i32 tile = first_tile; tile < key_tiles; tile += SPLITS) {
        mbarrier_wait(&shared.k_empty[ring.stage], ring.phase ^ 1);
        load_tile(shared.k[ring.stage], shared.k_full[ring.stage], k_map, work.batch, work.kv_head, tile * TILE_K,
                TILE_K);
        mbarrier_wait(&shared.v_empty[ring.stage], ring.phase ^ 1);
        load_tile(shared.v[ring.stage], shared.v_full[ring.stage], v_map, work.batch, work.kv_head, tile * TILE_K,
                TILE_K);
        ring.advance();
    }
}

// The four lanes of a quad hold the keys of the same two rows.
__device__ __forceinline__ float quad_combine_peak(float peak) {
    peak = peak_combine(peak, shuffle_xor(peak, 1));
    return peak_combine(peak, shuffle_xor(peak, 2));
}

__device__ __forceinline__ float quad_combine_mass(float mass) {
    mass = mass_combine(mass, shuffle_xor(mass, 1));
    return mass_combine(mass, shuffle_xor(mass, 2));
}

// Multiplies the rows of this warp by its 16 keys.
__device__ __forceinline__ void multiply_keys(float (&s)[2][4], const u32 (&q)[STEPS][4], u32 tile, i32 first_key) {
    const i32 matrix = lane_id() / OCTET, key = first_key + matrix / 2 * OCTET + lane_id() % OCTET;
    float odd[2][4] = {};  // the sums of every other step, which need not wait for the step between
#pragma unroll
    for (i32 step = 0; step < STEPS; ++step) {
        u32 k[4];
        ldmatrix(k, unit_address<TILE_K>(tile, key, 2 * step + matrix % 2));
        mma_m16n8k16_bf16(step % 2 ? odd[0] : s[0], q[step], k[0], k[1]);
        mma_m16n8k16_bf16(step % 2 ? odd[1] : s[1], q[step], k[2], k[3]);
    }
#pragma unroll
    for (i32 octet = 0; octet < 2; ++octet) {
#pragma unroll
        for (i32 held = 0; held < 4; ++held) s[octet][held] += odd[octet][held];
    }
}

// Selects the halves of a word with the values of a key and the next one that are present.
__device__ __forceinline__ u32 present_halves(i32 key, i32 present) {
    return (key < present ? 0xffffu : 0u) | (key + 1 < present ? 0xffff0000u : 0u);
}

// Adds the values of this warp's 16 keys, weighted. PARTIAL: those of keys from `present` on are 0, whatever the memory
// holds.
template <bool PARTIAL>
__device__ __forceinline__ void multiply_values(float (&acc)[2 * VALUE_SLABS][4], const u32 (&weights)[4], u32 tile,
        i32 first_key, i32 present) {
    const i32 own_key = first_key + lane_id() % 4 * 2;
    const u32 halves[2] = {present_halves(own_key, present), present_halves(own_key + OCTET, present)};
    const i32 matrix = lane_id() / OCTET, key = first_key + matrix % 2 * OCTET + lane_id() % OCTET;
#pragma unroll
    for (i32 slab = 0; slab < VALUE_SLABS; ++slab) {
        u32 v[4];
        ldmatrix_transposed(v, unit_address<TILE_K>(tile, key, 2 * slab + matrix / 2));
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            if (PARTIAL) v[i] &= halves[i % 2];
        }
        mma_m16n8k16_bf16(acc[2 * slab], weights, v[0], v[1]);
        mma_m16n8k16_bf16(acc[2 * slab + 1], weights, v[2], v[3]);
    }
}

// The pair of keys that a thread scores; past the end, the last pair, where the score may read its operands.
__device__ __forceinline__ i32 scored_key(i32 key, i32 keys) { return key < keys ? key : (keys - 1) & ~1; }

// Turns q . k^T into weights, in place; keys past the last one have the score -inf, so weight 0. `carried` is the
// rescale factor of the sums.
__device__ __forceinline__ void weigh(float (&s)[2][4], Rows& rows, float (&carried)[2], const Operands& operands,
        const Work& work, i32 first_row, i32 first_key, i32 queries, i32 keys) {
    const float old_peak[2] = {rows.peak[0], rows.peak[1]};
#pragma unroll
    for (i32 octet = 0; octet < 2; ++octet) {
        const i32 own = first_key + octet * OCTET, key = scored_key(own, keys);
#pragma unroll
        for (i32 row = 0; row < HALVES; ++row) {
            const i32 at = first_row + row * OCTET;
            const float product[2] = {s[octet][2 * row], s[octet][2 * row + 1]};
            float scored[2];
            score(operands, product, work.batch, work.head_of(at), work.query_of(at, queries), key, scored);
#pragma unroll
            for (i32 j = 0; j < 2; ++j) s[octet][2 * row + j] = own + j < keys ? scored[j] : peak_identity();
            rows.peak[row] = peak_combine(rows.peak[row], peak_combine(s[octet][2 * row], s[octet][2 * row + 1]));
        }
    }
#pragma unroll
    for (i32 row = 0; row < HALVES; ++row) {
        rows.peak[row] = quad_combine_peak(rows.peak[row]);
        const float reference = anchor(rows.peak[row]);
        carried[row] = weight(old_peak[row], reference);
        rows.mass[row] *= carried[row];
#pragma unroll
        for (i32 octet = 0; octet < 2; ++octet) {
#pragma unroll
            for (i32 j = 0; j < 2; ++j) {
                s[octet][2 * row + j] = weight(s[octet][2 * row + j], reference);
            }
            rows.mass[row] = mass_combine(rows.mass[row], mass_combine(s[octet][2 * row], s[octet][2 * row + 1]));
        }
    }
}

// Releases a stage to the producer, for this warp.
__device__ __forceinline__ void release(u64& empty) {
    warp_sync();
    if (lane_id() == 0) mbarrier_arrive(&empty);
}

// Adds up the values of this warp's keys in all tiles of the block.
__device__ __forceinline__ void consume(SharedMemory& shared, float (&acc)[2 * VALUE_SLABS][4], Rows& rows,
        const Operands& operands, const Work& work, i32 first_tile, i32 key_tiles, i32 queries, i32 keys) {
    const i32 keys_with_values = i32(min(i64(keys), seen_keys(operands, work.batch, work.kv_head * SHARING, 0)));
    const i32 row_slab = warp_id() / KEY_SLABS, key_slab = warp_id() % KEY_SLABS;
    const i32 own_row = row_slab * SLAB + lane_id() / 4, own_key = key_slab * SLAB + lane_id() % 4 * 2;

    u32 q[STEPS][4];
    mbarrier_wait(&shared.q_full, 0);
    const i32 matrix = lane_id() / OCTET;
    const i32 row = min(row_slab * SLAB + matrix % 2 * OCTET + lane_id() % OCTET, ROWS - 1);
    constexpr i32 TILE_ROWS = (ROWS + OCTET - 1) / OCTET * OCTET;
#pragma unroll
    for (i32 step = 0; step < STEPS; ++step) {
        ldmatrix(q[step], unit_address<TILE_ROWS>(shared_address(shared.q), row, 2 * step + matrix / 2));
    }
    Cursor ring;
    for (i32 tile = first_tile; tile < key_tiles; tile += SPLITS) {
        float s[2][4] = {};
        float carried[2] = {};
        mbarrier_wait(&shared.k_full[ring.stage], ring.phase);
        multiply_keys(s, q, shared_address(shared.k[ring.stage]), key_slab * SLAB);
        release(shared.k_empty[ring.stage]);
        weigh(s, rows, carried, operands, work, own_row, tile * TILE_K + own_key, queries, keys);
#pragma unroll
        for (i32 octet = 0; octet < 2 * VALUE_SLABS; ++octet) {
#pragma unroll
            for (i32 held = 0; held < 2 * HALVES; ++held) acc[octet][held] *= carried[held / 2];
        }
        const u32 weights[4] = {cvt_bf16x2(s[0][0], s[0][1]), cvt_bf16x2(s[0][2], s[0][3]),
                                cvt_bf16x2(s[1][0], s[1][1]), cvt_bf16x2(s[1][2], s[1][3])};
        mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
        const i32 present = keys_with_values - tile * TILE_K;
        if (present < TILE_K) {
            multiply_values<true>(acc, weights, shared_address(shared.v[ring.stage]), key_slab * SLAB, present);
        } else {
            multiply_values<false>(acc, weights, shared_address(shared.v[ring.stage]), key_slab * SLAB, present);
        }
        release(shared.v_empty[ring.stage]);
        ring.advance();
    }
}

// Leaves the sums and statistics of this warp in shared memory.
__device__ __forceinline__ void leave(const float (&acc)[2 * VALUE_SLABS][4], const Rows& rows) {
    auto sums = shared_array<float>(4 * WARP_SUMS * warp_id());
    auto peaks = shared_array<float>(PEAKS + 4 * SLAB * warp_id());
    auto masses = shared_array<float>(MASSES + 4 * SLAB * warp_id());
    const i32 quad_lane = lane_id() % 4, own_row = lane_id() / 4;
#pragma unroll
    for (i32 row = 0; row < HALVES; ++row) {
        const float mass = quad_combine_mass(rows.mass[row]);
        if (quad_lane == 0) {
            shared_store(peaks, own_row + row * OCTET, rows.peak[row]);
            shared_store(masses, own_row + row * OCTET, mass);
        }
#pragma unroll
        for (i32 octet = 0; octet < 2 * VALUE_SLABS; ++octet) {
            const i32 at = (own_row + row * OCTET) * PITCH + octet * OCTET + 2 * quad_lane;
            shared_store(sums, at, acc[octet][2 * row]);
            shared_store(sums, at + 1, acc[octet][2 * row + 1]);
        }
    }
}

// The sums of a row relative to a common peak.
struct Joined {
    float peak = peak_identity(), mass = 0.0f, pair[2] = {0.0f, 0.0f};

    __device__ __forceinline__ void raise(float other) { peak = peak_combine(peak, other); }

    // Adds sums whose peak has been given to `raise`.
    __device__ __forceinline__ void add(float other_peak, float other_mass, float first, float second) {
        const float factor = weight(other_peak, anchor(peak));
        mass = mass_combine(mass, other_mass * factor);
        pair[0] += first * factor;
        pair[1] += second * factor;
    }
};

// Joins the sums of the warps for a row and two channels.
__device__ __forceinline__ Joined join_warps(i32 row, i32 channel) {
    Joined joined;
    const i32 first = row / SLAB * KEY_SLABS, own = row % SLAB;
#pragma unroll
    for (i32 warp = 0; warp < KEY_SLABS; ++warp) {
        joined.raise(shared_load(shared_array<float>(PEAKS + 4 * SLAB * (first + warp)), own));
    }
#pragma unroll
    for (i32 warp = 0; warp < KEY_SLABS; ++warp) {
        auto sums = shared_array<float>(4 * WARP_SUMS * (first + warp));
        const float peak = shared_load(shared_array<float>(PEAKS + 4 * SLAB * (first + warp)), own);
        const float mass = shared_load(shared_array<float>(MASSES + 4 * SLAB * (first + warp)), own);
        joined.add(peak, mass, shared_load(sums, own * PITCH + channel), shared_load(sums, own * PITCH + channel + 1));
    }
    return joined;
}

// Finishes and stores the rows.
__device__ __forceinline__ void finish_rows(bf16* out, const Operands& operands, const Work& work, i32 rank,
        i32 queries) {
    for (i32 i = rank * THREADS + thread_id(); i < ROWS * VALUE_DIM / 2; i += SPLITS * THREADS) {
        const i32 row = i / (VALUE_DIM / 2), channel = i % (VALUE_DIM / 2) * 2;
        if (work.query + row % QUERIES >= queries) continue;
        const Joined joined = join_warps(row, channel);
        const i32 head = work.head_of(row), query = work.query_of(row, queries);
        bf16 finished[2];
        finish(operands, joined.pair, joined.mass, work.batch, head, query, channel, finished);
        store_vec<2>(out, out_offset(operands, work.batch, head, query) + channel, finished);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_cached_attention(
    const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    i64 /*batches*/, i64 heads, i64 queries, i64 keys,
    bf16* out_ptr,
    const i64* lengths_ptr,
    i64 k_cache_dim2_extent) {
    SharedMemory& shared = *shared_array<SharedMemory>(0);
    const i32 query_tiles = (i32(queries) + QUERIES - 1) / QUERIES;
    const Work work(block_id() / SPLITS, i32(heads) / SHARING, query_tiles);
    const i32 rank = block_id() % SPLITS;
    const Operands operands{static_cast<i32>(k_cache_dim2_extent), load(lengths_ptr, work.batch)};
    i32 key_tiles = (i32(keys) + TILE_K - 1) / TILE_K;
    // The last query of the tile sees the most keys.
    const i32 last_query = min(work.query + QUERIES, i32(queries)) - 1;
    const i64 seen = max(i64(0), seen_keys(operands, work.batch, work.kv_head * SHARING, last_query));
    key_tiles = i32(min(i64(key_tiles), (seen + TILE_K - 1) / TILE_K));

    // One thread of the last warp is the producer.
    const bool produces = thread_id() == WARPS * 32;
    if (produces) {
        tma_prefetch_map(q_map);
        tma_prefetch_map(k_map);
        tma_prefetch_map(v_map);
        barriers_init(shared);
    }
    block_sync();
    float acc[2 * VALUE_SLABS][4] = {};
    Rows rows;
    if (produces) {
        produce(shared, q_map, k_map, v_map, work, rank, key_tiles);
    } else if (warp_id() < WARPS) {
        consume(shared, acc, rows, operands, work, rank, key_tiles, i32(queries), i32(keys));
    }
    block_sync();
    if (warp_id() < WARPS) leave(acc, rows);
    block_sync();
    finish_rows(out_ptr, operands, work, rank, i32(queries));
}
