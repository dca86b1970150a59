// flash_attention: attention, emitted by fusegen for sm_90a.
// Grid min(q_dim0 * q_dim1 * ((q_dim2 + 127) / 128), 132), block 384, 197632 bytes of shared memory.
// Reads q_dim0 * q_dim1 * q_dim2 * 768 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// q, k, v, out: bf16 [q_dim0, q_dim1, q_dim2, 128], contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.maps.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/cvt_bf16x2.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp2.cuh"
#include "../primitives/infinity.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/lower_registers.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/mbarrier_arrive.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/quad_transpose.cuh"
#include "../primitives/raise_registers.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/tma_load_4d.cuh"
#include "../primitives/wgmma_commit.cuh"
#include "../primitives/wgmma_descriptor.cuh"
#include "../primitives/wgmma_fence.cuh"
#include "../primitives/wgmma_wait.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// weights_of in fusegen/specs/attention.py; its def is line 1:
//    4: return torch.softmax(scores, -1)
// flash_attention in fusegen/specs/attention.py; its def is line 1:
//   47: result = weights.to(v.dtype) @ shared(v, q.shape[-3])

// Operands that the math loads.
struct Operands {
    i32 q_dim1;
    i32 q_dim2;
};

__device__ __forceinline__ float flash_attention_score(float product) {
    return product;
}

// Scores two neighbouring keys.
__device__ __forceinline__ void score(const Operands& /*operands*/, const float (&product)[2], i32 /*batch*/,
                                      i32 /*head*/, i32 /*query*/, i32 /*key*/, float (&s)[2]) {
#pragma unroll
    for (i32 v = 0; v < 2; ++v) s[v] = flash_attention_score(product[v]);
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

__device__ __forceinline__ float flash_attention_finish(float total, float mass) {
    return total * fast_divide(1.0f, mass);                                           // flash_attention, line 47
}

// Finishes two neighbouring channels of a query.
__device__ __forceinline__ void finish(const Operands& /*operands*/, const float (&total)[2], float mass, i32 /*batch*/,
                                       i32 /*head*/, i32 /*query*/, i32 /*channel*/, bf16 (&out)[2]) {
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = flash_attention_finish(total[v], mass);
    narrow_vec(result, out);
}

// The offset of a query's first channel in the output.
__device__ __forceinline__ i64 out_offset(const Operands& operands, i32 batch, i32 head, i32 query) {
    return batch * operands.q_dim1 * operands.q_dim2 * 128 + head * operands.q_dim2 * 128 + query * 128;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 HEAD_DIM = 128;  // of queries and keys
constexpr i32 VALUE_DIM = 128;
constexpr i32 CONSUMERS = 2;  // consumer warpgroups
constexpr i32 ROWS = 64;  // query rows of a consumer
constexpr i32 TILE_Q = CONSUMERS * ROWS;
constexpr i32 TILE_K = 128;
constexpr i32 STAGES = 2;  // of keys, and the same number of values
constexpr i32 Q_STAGES = 2;
constexpr i32 SHARING = 1;  // query heads of a GQA group

constexpr i32 WARPGROUP = 128;
constexpr i32 THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr i32 K_STEP = 16;  // depth of one wgmma
constexpr i32 LINE = 64;  // elements of a 128-byte line of the swizzle
constexpr i32 LINE_BYTES = 128;
constexpr i32 LINES = (HEAD_DIM + LINE - 1) / LINE;  // TMA pads the last one with zeros
constexpr i32 VALUE_LINES = (VALUE_DIM + LINE - 1) / LINE;
static_assert(HEAD_DIM % 8 == 0 && VALUE_DIM % 8 == 0 && TILE_K % K_STEP == 0,
        "whole vectors of 16 bytes, whole steps");
constexpr i32 SCORES = ROWS * TILE_K / WARPGROUP;  // accumulators of a thread: scores of a key tile
constexpr i32 CHANNELS = ROWS * VALUE_DIM / WARPGROUP;  // accumulators of a thread: output

// d (+)= A[64, 16] * B[128, 16]^T, bf16 in, fp32 out; a warpgroup executes it, both operands in shared memory.
// Warp w, lane l: d[4i + 2h + j] is row 16w + l/4 + 8h, column 8i + 2(l%4) + j. The sum replaces d unless `accumulate`.
__device__ __forceinline__ void wgmma_m64n128k16_bf16(float (&d)[64], u64 a, u64 b, i32 accumulate) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0;\n\t"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

// d += A[64, 16] * B[128, 16]^T, bf16 in, fp32 out; a warpgroup executes it, A in registers, B in shared memory, MN-
// major.
// Warp w, lane l: a[2k + h] holds row 16w + l/4 + 8h, columns 8k + 2(l%4) and the next one.
__device__ __forceinline__ void wgmma_m64n128k16_bf16_rs(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, 1, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Shared memory of a block. Tiles are columns of 128-byte lines, the layout of TMA.
struct alignas(1024) SharedMemory {
    bf16 q[Q_STAGES][LINES][TILE_Q][LINE];
    bf16 k[STAGES][LINES][TILE_K][LINE];
    bf16 v[STAGES][VALUE_LINES][TILE_K][LINE];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES];
    u64 v_full[STAGES], v_empty[STAGES];
};
static_assert(sizeof(SharedMemory) == 197632, "the launch reserves what the kernel uses");

// Position in a ring of stages. The phase flips at each turn: consumers wait for `phase`, the producer for its
// opposite.
template <i32 COUNT>
struct Cursor {
    i32 stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// A query tile. Neighboring blocks work on the same head and share its keys and values in L2.
struct Work {
    i32 batch, head, query;

    __device__ __forceinline__ Work(i32 index, i32 heads, i32 query_tiles)
        : batch(index / query_tiles / heads), head(index / query_tiles % heads), query(index % query_tiles * TILE_Q) {}
};

// Statistics of a thread's two rows. `mass`, the row sum, covers this thread's columns only until the rows are
// finished.
struct Rows {
    float peak[2] = {peak_identity(), peak_identity()};
    float mass[2] = {0.0f, 0.0f};
};

// Accumulator pair p of a thread: which of its two rows, and the offset of its two columns.
__device__ __forceinline__ constexpr i32 pair_row(i32 p) { return p % 2; }
__device__ __forceinline__ constexpr i32 pair_column(i32 p) { return p / 2 * 8; }

__device__ __forceinline__ void barriers_init(SharedMemory& shared) {
    constexpr u32 CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
    for (i32 stage = 0; stage < Q_STAGES; ++stage) {
        mbarrier_init(&shared.q_full[stage], 1);
        mbarrier_init(&shared.q_empty[stage], CONSUMER_WARPS);
    }
    for (i32 stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(&shared.k_full[stage], 1);
        mbarrier_init(&shared.v_full[stage], 1);
        mbarrier_init(&shared.k_empty[stage], CONSUMER_WARPS);
        mbarrier_init(&shared.v_empty[stage], CONSUMER_WARPS);
    }
    mbarrier_init_fence();
}

template <i32 LINES_OF_TILE, i32 ROWS_OF_TILE>
__device__ __forceinline__ void load_tile(bf16 (&tile)[LINES_OF_TILE][ROWS_OF_TILE][LINE], u64& full,
                                          const TensorMap& map, i32 batch, i32 head, i32 first) {
    mbarrier_expect(&full, sizeof(tile));
#pragma unroll
    for (i32 line = 0; line < LINES_OF_TILE; ++line) {
        tma_load_4d(tile[line], map, &full, line * LINE, first, head, batch);
    }
}

// Loads tiles in the order of the consumers. Keys run from the last tile, the only partial one, to the first.
__device__ __forceinline__ void produce(SharedMemory& shared, const TensorMap& q_map, const TensorMap& k_map,
                                        const TensorMap& v_map, i32 works, i32 heads, i32 query_tiles, i32 key_tiles) {
    Cursor<Q_STAGES> q;
    Cursor<STAGES> k, v;

    const auto load_k = [&](const Work& work, i32 tile) {
        mbarrier_wait(&shared.k_empty[k.stage], k.phase ^ 1);
        load_tile(shared.k[k.stage], shared.k_full[k.stage], k_map, work.batch, work.head / SHARING, tile * TILE_K);
        k.advance();
    };
    const auto load_v = [&](const Work& work, i32 tile) {
        mbarrier_wait(&shared.v_empty[v.stage], v.phase ^ 1);
        load_tile(shared.v[v.stage], shared.v_full[v.stage], v_map, work.batch, work.head / SHARING, tile * TILE_K);
        v.advance();
    };

    for (i32 index = block_id(); index < works; index += block_count()) {
        const Work work(index, heads, query_tiles);
        load_k(work, key_tiles - 1);
        mbarrier_wait(&shared.q_empty[q.stage], q.phase ^ 1);
        load_tile(shared.q[q.stage], shared.q_full[q.stage], q_map, work.batch, work.head, work.query);
        q.advance();
        for (i32 tile = key_tiles - 1; tile > 0; --tile) {
            load_k(work, tile - 1);
            load_v(work, tile);
        }
        load_v(work, 0);
    }
}

// Issues s = q . k^T for the rows of the warpgroup.
__device__ __forceinline__ void start_scores(float (&s)[SCORES], u64 q, u64 k) {
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < (HEAD_DIM + K_STEP - 1) / K_STEP; ++step) {
        const i32 line = step * K_STEP / LINE;
        const i32 within = step * K_STEP % LINE * sizeof(bf16);
        wgmma_m64n128k16_bf16(s, wgmma_advance(q, line * TILE_Q * LINE_BYTES + within),
            wgmma_advance(k, line * TILE_K * LINE_BYTES + within), step > 0);
    }
    wgmma_commit();
}

// Issues acc += weights . v, with the weights in registers and v MN-major.
__device__ __forceinline__ void start_values(float (&acc)[CHANNELS], const u32 (&weights)[SCORES / 2], u64 v) {
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < TILE_K / K_STEP; ++step) {
        const u32 a[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        wgmma_m64n128k16_bf16_rs(acc, a, wgmma_advance(v, step * K_STEP * LINE_BYTES));
    }
    wgmma_commit();
}

// The four lanes of a quad hold the columns of the same two rows.
__device__ __forceinline__ float quad_combine_peak(float peak) {
    peak = peak_combine(peak, shuffle_xor(peak, 1));
    return peak_combine(peak, shuffle_xor(peak, 2));
}

__device__ __forceinline__ float quad_combine_mass(float mass) {
    mass = mass_combine(mass, shuffle_xor(mass, 1));
    return mass_combine(mass, shuffle_xor(mass, 2));
}

// Turns q . k^T of a key tile into weights, in place. `carried` is the rescale factor of the accumulators.
// RAGGED: the tile may be partial; columns past the last key have the score -inf, so weight 0.
template <bool RAGGED>
__device__ __forceinline__ void weigh(float (&s)[SCORES], Rows& rows, float (&carried)[2], const Operands& operands,
                                      const Work& work, i32 first_query, i32 first_key, i32 queries, i32 keys) {
    // Rows past the end are scored like the last one and never stored.
    const i32 query[2] = {min(first_query, queries - 1), min(first_query + 8, queries - 1)};
    const i32 left = keys - first_key;
    const float old_peak[2] = {rows.peak[0], rows.peak[1]};
#pragma unroll
    for (i32 p = 0; p < SCORES / 2; ++p) {
        const i32 row = pair_row(p);
        const i32 column = pair_column(p);
        // A pair past the end is scored at the last pair of keys, where the score may read its operands.
        const i32 key = RAGGED && column >= left ? (keys - 1) & ~1 : first_key + column;
        const float product[2] = {s[2 * p], s[2 * p + 1]};
        float scored[2];
        score(operands, product, work.batch, work.head, query[row], key, scored);
#pragma unroll
        for (i32 j = 0; j < 2; ++j) s[2 * p + j] = RAGGED && column + j >= left ? peak_identity() : scored[j];
        rows.peak[row] = peak_combine(rows.peak[row], peak_combine(s[2 * p], s[2 * p + 1]));
    }
    float anchors[2];
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
        rows.peak[row] = quad_combine_peak(rows.peak[row]);
        anchors[row] = anchor(rows.peak[row]);
        carried[row] = weight(old_peak[row], anchors[row]);
        rows.mass[row] *= carried[row];
    }
#pragma unroll
    for (i32 p = 0; p < SCORES / 2; ++p) {
        const i32 row = pair_row(p);
#pragma unroll
        for (i32 j = 0; j < 2; ++j) s[2 * p + j] = weight(s[2 * p + j], anchors[row]);
        rows.mass[row] = mass_combine(rows.mass[row], mass_combine(s[2 * p], s[2 * p + 1]));
    }
}

// The layout of an accumulator equals that of the A operand of wgmma in registers.
__device__ __forceinline__ void pack_weights(u32 (&weights)[SCORES / 2], const float (&s)[SCORES]) {
#pragma unroll
    for (i32 p = 0; p < SCORES / 2; ++p) weights[p] = cvt_bf16x2(s[2 * p], s[2 * p + 1]);
}

__device__ __forceinline__ void apply_carry(float (&acc)[CHANNELS], const float (&carried)[2]) {
#pragma unroll
    for (i32 p = 0; p < CHANNELS / 2; ++p) {
        acc[2 * p] *= carried[pair_row(p)];
        acc[2 * p + 1] *= carried[pair_row(p)];
    }
}

// Releases a stage to the producer, for this warp, and advances to the next.
template <i32 COUNT>
__device__ __forceinline__ void release(u64 (&empty)[COUNT], Cursor<COUNT>& cursor) {
    if (lane_id() == 0) mbarrier_arrive(&empty[cursor.stage]);
    cursor.advance();
}

// Lanes of a quad hold alternating pairs of channels; after a transpose, each lane stores eight contiguous channels.
__device__ __forceinline__ void store_rows(bf16* out, const float (&acc)[CHANNELS], const Rows& rows,
                                           const Operands& operands, const Work& work, i32 first_query, i32 queries) {
    const i32 quad_lane = lane_id() % 4;
    const float mass[2] = {quad_combine_mass(rows.mass[0]), quad_combine_mass(rows.mass[1])};
#pragma unroll
    for (i32 row = 0; row < 2; ++row) {
        const bool stored = first_query + 8 * row < queries;
        const i32 query = stored ? first_query + 8 * row : queries - 1;
        const i64 base = out_offset(operands, work.batch, work.head, query);
#pragma unroll
        for (i32 first = row; first < CHANNELS / 2; first += 8) {
            u32 words[4];
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const i32 p = first + 2 * i;
                const float pair[2] = {acc[2 * p], acc[2 * p + 1]};
                bf16 finished[2];
                finish(operands, pair, mass[row], work.batch, work.head, query, pair_column(p) + quad_lane * 2,
                        finished);
                memcpy(&words[i], finished, sizeof(words[i]));
            }
            quad_transpose(words);
            bf16 octet[8];
            memcpy(octet, words, sizeof(octet));
            if (stored) store_vec<8>(out, base + pair_column(first) + quad_lane * 8, octet);
        }
    }
}

__device__ __forceinline__ void consume(SharedMemory& shared, i32 consumer, bf16* out, const Operands& operands,
                                        i32 works, i32 heads, i32 queries, i32 keys, i32 query_tiles, i32 key_tiles) {
    const i32 thread = thread_id() % WARPGROUP;
    const i32 own_row = consumer * ROWS + thread / 32 * 16 + thread % 32 / 4;
    const i32 own_key = thread % 4 * 2;
    const bool ragged = key_tiles * TILE_K > keys;

    Cursor<Q_STAGES> q;
    Cursor<STAGES> k, v;
    const auto wait_for_keys = [&] { mbarrier_wait(&shared.k_full[k.stage], k.phase); };
    const auto wait_for_values = [&] { mbarrier_wait(&shared.v_full[v.stage], v.phase); };
    const auto q_rows = [&] { return wgmma_descriptor(shared.q[q.stage][0][consumer * ROWS]); };
    const auto k_tile = [&] { return wgmma_descriptor(shared.k[k.stage]); };
    const auto v_tile = [&] { return wgmma_descriptor(shared.v[v.stage], 8 * LINE_BYTES, TILE_K * LINE_BYTES); };

    for (i32 index = block_id(); index < works; index += block_count()) {
        const Work work(index, heads, query_tiles);
        const i32 first_query = work.query + own_row;
        // Opaque, so that values derived from it are not kept in registers across query tiles.
        const i32 last_key = opaque((key_tiles - 1) * TILE_K + own_key);

        Rows rows;
        float s[SCORES];
        u32 weights[SCORES / 2];
        float acc[CHANNELS] = {};
        float carried[2];  // unused after the first tile, where acc is zero

        mbarrier_wait(&shared.q_full[q.stage], q.phase);
        wait_for_keys();
        start_scores(s, q_rows(), k_tile());
        wgmma_wait<0>(s);
        release(shared.k_empty, k);
        if (ragged) {
            weigh<true>(s, rows, carried, operands, work, first_query, last_key, queries, keys);
        } else {
            weigh<false>(s, rows, carried, operands, work, first_query, last_key, queries, keys);
        }
        pack_weights(weights, s);

        if (key_tiles > 1) wait_for_keys();
        for (i32 tile = key_tiles - 2; tile >= 0; --tile) {
            start_scores(s, q_rows(), k_tile());
            wait_for_values();
            start_values(acc, weights, v_tile());
            wgmma_wait<1>(s);
            release(shared.k_empty, k);
            weigh<false>(s, rows, carried, operands, work, first_query, tile * TILE_K + own_key, queries, keys);
            // Waiting for the next keys here is a branch, which keeps ptxas from moving the wait for acc above weigh.
            if (tile > 0) wait_for_keys();
            wgmma_wait<0>(acc);
            release(shared.v_empty, v);
            apply_carry(acc, carried);
            pack_weights(weights, s);
        }
        release(shared.q_empty, q);

        wait_for_values();
        start_values(acc, weights, v_tile());
        wgmma_wait<0>(acc);
        release(shared.v_empty, v);
        store_rows(out, acc, rows, operands, work, first_query, queries);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fg_flash_attention(
    const __grid_constant__ TensorMap q_map,
    const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    i64 batches, i64 heads, i64 queries, i64 keys,
    bf16* out_ptr,
    i64 q_dim1_extent,
    i64 q_dim2_extent) {
    SharedMemory& shared = *shared_array<SharedMemory>(0);
    const i32 query_tiles = (i32(queries) + TILE_Q - 1) / TILE_Q;
    const i32 key_tiles = (i32(keys) + TILE_K - 1) / TILE_K;
    const i32 works = i32(batches) * i32(heads) * query_tiles;

    if (thread_id() == 0) barriers_init(shared);
    block_sync();

    // One thread of the last warpgroup is the producer.
    const i32 warpgroup = thread_id() / WARPGROUP;
    if (warpgroup == CONSUMERS) {
        lower_registers<24>();
        if (thread_id() == CONSUMERS * WARPGROUP) {
            produce(shared, q_map, k_map, v_map, works, i32(heads), query_tiles, key_tiles);
        }
    } else {
        raise_registers<240>();
        const Operands operands{static_cast<i32>(q_dim1_extent), static_cast<i32>(q_dim2_extent)};
        consume(shared, warpgroup, out_ptr, operands, works, i32(heads), i32(queries), i32(keys), query_tiles,
                key_tiles);
    }
}
