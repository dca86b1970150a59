// layer_norm_mlp_1: matmul with epilogue, emitted by fusegen for sm_90a.
// Grid min(((x_dim0 + 127) / 128) * 86, 132), block 384, 196688 bytes of shared memory.
// Reads x_dim0 * 8192 + 134250496 bytes, writes x_dim0 * 32768.
// normalized: bf16 [x_dim0, 4096]; fc1_weight: bf16 [16384, 4096]; gelu_of: bf16 [x_dim0, 16384]; fc1_bias: bf16
// [16384]; all contiguous, 16-byte aligned.
// A launch of its own reads gelu_of: matmul with epilogue.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.maps.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
#include "../primitives/fence_proxy_async.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/launch_dependents.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/widen.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"
#include "../primitives/load_wide.cuh"
#include "../primitives/lower_registers.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/mbarrier_arrive.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait.cuh"
#include "../primitives/named_barrier_sync.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/pack_pair.cuh"
#include "../primitives/raise_registers.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/store_shared_words.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/tma_load_2d.cuh"
#include "../primitives/tma_prefetch_map.cuh"
#include "../primitives/tma_store_2d.cuh"
#include "../primitives/tma_store_commit.cuh"
#include "../primitives/tma_store_wait.cuh"
#include "../primitives/wait_for_previous.cuh"
#include "../primitives/wgmma_commit.cuh"
#include "../primitives/wgmma_descriptor.cuh"
#include "../primitives/wgmma_fence.cuh"
#include "../primitives/wgmma_wait.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// projected in fusegen/specs/linear.py; its def is line 1:
//    8: return F.linear(x, weight, bias)
// gelu_of in fusegen/specs/elementwise.py; its def is line 1:
//    8: return F.gelu(x, approximate=approximate)

// Operands that the math loads.
struct Operands {
    const bf16* fc1_bias_ptr;
};

// gelu in its tanh form, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2u).
__device__ __forceinline__ float layer_norm_mlp_1_epilogue(float product, float fc1_bias) {
    const float sum = product + fc1_bias;                                             // projected, line 8
    const float product_2 = sum * (1.5957692f + 0.071354814f * (sum * sum));          // gelu_of, line 8
    return sum * fast_reciprocal(1.0f + fast_exp(-product_2));
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue(const Operands& operands, const float (&product)[2], i32 col, bf16 (&out)[2]) {
    float fc1_bias[2];
    load_wide(fc1_bias, operands.fc1_bias_ptr, col);
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = layer_norm_mlp_1_epilogue(product[v], fc1_bias[v]);
    narrow_vec(result, out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
// d (+)= A[64, 16] * B[192, 16]^T, bf16 in, fp32 out; a warpgroup executes it, both operands in shared memory.
// Warp w, lane l: d[4i + 2h + j] is row 16w + l/4 + 8h, column 8i + 2(l%4) + j. The sum replaces d unless `accumulate`.
__device__ __forceinline__ void wgmma_m64n192k16_bf16(float (&d)[96], u64 a, u64 b, i32 accumulate) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %98, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
        " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, p, 1, 1, 0, 0;\n\t"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
        : "l"(a), "l"(b), "r"(accumulate));
}

using Index = i32;
constexpr i32 WARP = 32, WARPGROUP = 4 * WARP;
constexpr i32 QUAD = 4;   // lanes of a warp that hold the columns of a row
constexpr i32 OCTET = 8;  // columns of an n8 fragment; rows between a thread's two; lines of a swizzle atom
constexpr i32 LINE_BYTES = 128;  // of the swizzle
constexpr u32 ATOM_BYTES = OCTET * LINE_BYTES;
constexpr i32 SLAB = 64;  // rows of one wgmma
constexpr u32 SLAB_BYTES = SLAB * LINE_BYTES;

// Tiles of C are TILE_M x TILE_N; a stage holds TILE_K of the depth.
constexpr i32 CONSUMERS = 2;  // consumer warpgroups, which multiply tiles in turns
constexpr i32 SLABS = 2;  // of a tile
constexpr i32 TILE_M = SLAB * SLABS;
constexpr i32 TILE_N = 192;
constexpr i32 TILE_K = LINE_BYTES / sizeof(bf16);
constexpr i32 ACCUMULATORS = TILE_N / 2;  // of a thread per slab
constexpr i32 STAGES = 4;
constexpr i32 GROUP = 8;  // rows of tiles in one swizzle group, for reuse in L2
constexpr u32 STAGE_BYTES = (TILE_M + TILE_N) * LINE_BYTES;
constexpr i32 THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr i32 BLOCKS_PER_SM = 1;  // at least; without this number, ptxas allocates registers worse
constexpr i32 SHARED_BYTES = 196688;  // that the launch reserves
constexpr i32 CHUNK_BUFFERS = 2;  // of a warpgroup, which take turns; each holds a line per row of a slab of results

constexpr i32 COLUMNS = 16384;
constexpr i32 WIDTH = 86;  // tiles per row of tiles

struct SharedMemory {
    bf16 a[STAGES][TILE_M * TILE_K];
    bf16 b[STAGES][TILE_N * TILE_K];
    u8 chunks[CONSUMERS][CHUNK_BUFFERS][SLAB_BYTES];
    u64 full[STAGES];   // mbarriers: TMA has filled a stage
    u64 empty[STAGES];  // mbarriers: the warps that multiply it have released a stage
    u64 turns[CONSUMERS];  // mbarriers: the other warpgroup has issued all wgmma of its tile
};
static_assert(sizeof(SharedMemory) <= SHARED_BYTES, "the launch reserves less shared memory than the pipeline uses");
static_assert(sizeof(SharedMemory::a[0]) % ATOM_BYTES == 0 && sizeof(SharedMemory::b[0]) % ATOM_BYTES == 0,
        "stages begin with a swizzle atom");

// Position in the ring of stages, and the parity of the mbarrier phase.
struct Cursor {
    i32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ void skip(i32 steps) {
        parity ^= (stage + steps) / STAGES & 1;
        stage = (stage + steps) % STAGES;
    }
};

// First row and column of a tile.
struct Tile {
    i32 row, col;
};

// Row and column of a thread's first value within a slab.
struct Place {
    i32 row, col;
};

// The tiles of this block: every `stride`-th. The order is swizzled for L2: GROUP tiles down, then one to the right.
struct Schedule {
    i32 height;  // rows of tiles in C
    i32 index, stride;

    __device__ __forceinline__ Schedule(i64 rows)
        : height(static_cast<i32>((rows + TILE_M - 1) / TILE_M)), index(block_id()), stride(block_count()) {}

    __device__ __forceinline__ bool next(Tile& tile) {
        if (index >= height * WIDTH) return false;
        const i32 group_size = GROUP * WIDTH;
        const i32 first = index / group_size * GROUP;
        const i32 group_height = min(GROUP, height - first);
        const i32 within = index % group_size;
        tile.row = (first + within % group_height) * TILE_M;
        tile.col = within / group_height * TILE_N;
        index += stride;
        return true;
    }
};

// The producer thread keeps the ring full across tiles: the loads of the next tile run during the epilogue.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, SharedMemory& shared,
        Schedule schedule, i32 depth) {
    Cursor cursor;
    for (Tile tile; schedule.next(tile);) {
        for (i32 k = 0; k < depth; k += TILE_K, cursor.advance()) {
            const i32 stage = cursor.stage;
            u64* full = &shared.full[stage];
            mbarrier_wait(&shared.empty[stage], cursor.parity ^ 1);
            mbarrier_expect(full, STAGE_BYTES);
            tma_load_2d(shared.a[stage], a_map, full, k, tile.row);
            tma_load_2d(shared.b[stage], b_map, full, k, tile.col);
        }
    }
    launch_dependents();
}

// Releases a stage to the producer, for this warp.
__device__ __forceinline__ void release(SharedMemory& shared, i32 stage) {
    if (lane_id() == 0) mbarrier_arrive(&shared.empty[stage]);
}

// Issues the wgmma of one stage.
__device__ __forceinline__ void multiply_stage(float (&accumulator)[SLABS][ACCUMULATORS], const SharedMemory& shared,
        i32 stage, bool first) {
    constexpr i32 DEPTH = 16;  // of one wgmma
    constexpr u32 STEP = DEPTH * sizeof(bf16);  // bytes
    const u64 a = wgmma_descriptor(shared.a[stage], ATOM_BYTES, SLAB_BYTES);
    const u64 b = wgmma_descriptor(shared.b[stage], ATOM_BYTES, SLAB_BYTES);
    wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < TILE_K / DEPTH; ++i) {
#pragma unroll
        for (i32 slab = 0; slab < SLABS; ++slab) {
            wgmma_m64n192k16_bf16(accumulator[slab], wgmma_advance(a, i * STEP + slab * SLAB_BYTES),
                    wgmma_advance(b, i * STEP), !first || i > 0);
        }
    }
    wgmma_commit();
}

// Multiplies one tile. A stage is released after the wgmma of the next stage are issued, which keeps the tensor cores
// busy.
__device__ __forceinline__ void multiply_tile(float (&accumulator)[SLABS][ACCUMULATORS], SharedMemory& shared,
        Cursor& cursor, i32 depth, i32 consumer) {
    i32 previous = cursor.stage;
    mbarrier_wait(&shared.full[cursor.stage], cursor.parity);
    multiply_stage(accumulator, shared, cursor.stage, true);
    cursor.advance();
    for (i32 k = TILE_K; k < depth; k += TILE_K, cursor.advance()) {
        mbarrier_wait(&shared.full[cursor.stage], cursor.parity);
        multiply_stage(accumulator, shared, cursor.stage, false);
        wgmma_wait<1>();
        release(shared, previous);
        previous = cursor.stage;
    }
    if (lane_id() == 0) mbarrier_arrive(&shared.turns[1 - consumer]);
    wgmma_wait<0>(accumulator[0]);
    wgmma_wait<0>(accumulator[1]);
    release(shared, previous);
}

// Shared-memory address of a byte of a chunk in the 128-byte swizzle of TMA: the 16-byte units of a line are permuted
// by the line number, which also avoids bank conflicts.
__device__ __forceinline__ u32 chunk_address(u32 chunk, u32 row, u32 byte) {
    return chunk + row * LINE_BYTES + (byte ^ (row % OCTET << 4));
}

// Stores a slab of results of 16 bits with TMA, in chunks of a line per row; TMA clips at the borders of C.
__device__ __forceinline__ void store_tile(const u32 (&words)[TILE_N / 4], const TensorMap& map, SharedMemory& shared,
        i32& buffer, Tile tile, Place place, i32 consumer) {
    constexpr i32 CHUNK = LINE_BYTES / sizeof(bf16);  // columns
    const bool leader = thread_id() % WARPGROUP == 0;
    const i32 barrier = 1 + consumer;  // 0 is that of block_sync
#pragma unroll
    for (i32 first = 0; first < TILE_N; first += CHUNK) {
        u8* chunk = shared.chunks[consumer][buffer];
        buffer = (buffer + 1) % CHUNK_BUFFERS;
        if (leader) tma_store_wait<CHUNK_BUFFERS - 1>();  // only the last store may be under way, from the other buffer
        named_barrier_sync(barrier, WARPGROUP);
#pragma unroll
        for (i32 pair = 0; pair < CHUNK / 4; ++pair) {
            const u32 byte = (place.col + pair / 2 * OCTET) * sizeof(bf16);
            const u32 address = chunk_address(shared_address(chunk), place.row + pair % 2 * OCTET, byte);
            store_shared_words(address, words[first / 4 + pair]);
        }
        fence_proxy_async();
        named_barrier_sync(barrier, WARPGROUP);
        if (leader) {
            tma_store_2d(map, chunk, tile.col + first, tile.row);
            tma_store_commit();
        }
    }
}

// A row or column, or the last one in place of those outside of C, where results are not stored: an epilogue without
// branches keeps many loads of operands in flight.
template <bool INSIDE>
__device__ __forceinline__ Index nearest(Index position, i64 last) {
    return INSIDE ? position : min(position, static_cast<Index>(last));
}

// Applies the epilogue to a thread's values of a slab: pairs of columns in two rows, OCTET apart.
// A pair of 16-bit results shares a register.
// INSIDE: no column lies outside of C.
template <bool INSIDE>
__device__ __forceinline__ void finish_tile(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        Tile tile, Place place, u32 (&y)[ACCUMULATORS / 2]) {
    constexpr i32 LAST_PAIR = COLUMNS - 2;
#pragma unroll
    for (i32 held = 0; held < ACCUMULATORS; held += 2) {
        const Index col = nearest<INSIDE>(place.col + held / 4 * OCTET, LAST_PAIR - tile.col);
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        bf16 y_pair[2];
        epilogue(operands, product, tile.col + col, y_pair);
        y[held / 2] = pack_pair(y_pair);
    }
}

// Finishes and stores a slab.
__device__ __forceinline__ void finish(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        const TensorMap& y_map, SharedMemory& shared, i32& buffer, i32 consumer, Tile tile, Place place, i64 rows) {
    if (tile.row >= rows) return;
    u32 y[ACCUMULATORS / 2];
    if (tile.col + TILE_N <= COLUMNS) {
        finish_tile<true>(accumulator, operands, tile, place, y);
    } else {
        finish_tile<false>(accumulator, operands, tile, place, y);
    }
    store_tile(y, y_map, shared, buffer, tile, place, consumer);
}

// Computes every second tile of this block. A warpgroup multiplies while the other one applies its epilogue: it waits
// for its turn, which the other one gives when all wgmma of its tile are issued, and skips the stages of that tile.
// Without turns, it could take these stages for its own, since the parity of an mbarrier repeats after two phases.
__device__ __forceinline__ void consume(const Operands& operands, const TensorMap& y_map, SharedMemory& shared,
        Schedule schedule, i64 rows, i32 depth, i32 consumer) {
    Cursor cursor;
    const i32 steps = (depth + TILE_K - 1) / TILE_K;
    schedule.index += consumer * schedule.stride;
    schedule.stride *= CONSUMERS;
    cursor.skip(consumer * steps);
    u32 turn = 1 - consumer;  // parity of the phase to wait for; the first warpgroup begins without a wait
    for (Tile tile; schedule.next(tile); cursor.skip(steps), turn ^= 1) {
        float accumulator[SLABS][ACCUMULATORS];
        mbarrier_wait(&shared.turns[consumer], turn);
        multiply_tile(accumulator, shared, cursor, depth, consumer);
        i32 buffer = 0;  // that the next chunk of results takes
        tma_store_wait<0>();  // the previous tile may have left its last chunk in the same buffer

#pragma unroll
        for (i32 slab = 0; slab < SLABS; ++slab, tile.row += SLAB) {
            // Opaque: the compiler would compute addresses before the matmul, and these would take registers during it.
            const i32 thread = opaque(thread_id() % WARPGROUP);
            const Place place{thread / WARP * 16 + thread % WARP / QUAD, thread % QUAD * 2};  // a warp holds 16 rows
            finish(accumulator[slab], operands, y_map, shared, buffer, consumer, tile, place, rows);
        }
    }
    tma_store_wait<0>();
}

// Each stage is filled by one thread, and released by each warp that multiplies it.
__device__ __forceinline__ void initialise(SharedMemory& shared) {
    for (i32 stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(&shared.full[stage], 1);
        mbarrier_init(&shared.empty[stage], WARPGROUP / WARP);
    }
    for (i32 consumer = 0; consumer < CONSUMERS; ++consumer) mbarrier_init(&shared.turns[consumer], WARPGROUP / WARP);
    mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_layer_norm_mlp_1(
    const __grid_constant__ TensorMap a_map,  // of normalized
    const __grid_constant__ TensorMap b_map,  // of fc1_weight
    const __grid_constant__ TensorMap y_map,  // of gelu_of
    i64 rows, i64 depth,
    const bf16* fc1_bias_ptr) {
    wait_for_previous();
    SharedMemory& shared = *shared_array<SharedMemory>(0);
    const Schedule schedule(rows);

    if (thread_id() == 0) {
        tma_prefetch_map(a_map);
        tma_prefetch_map(b_map);
        initialise(shared);
    }
    block_sync();

    const i32 warpgroup = thread_id() / WARPGROUP;
    if (warpgroup == CONSUMERS) {
        lower_registers<24>();
        if (thread_id() == CONSUMERS * WARPGROUP) {
            produce(a_map, b_map, shared, schedule, static_cast<i32>(depth));
        }
    } else {
        raise_registers<240>();
        const Operands operands{fc1_bias_ptr};
        consume(operands, y_map, shared, schedule, rows, static_cast<i32>(depth), warpgroup);
    }
}
