// qkv_linear: matmul with epilogue, 1024 + 1024 + 4096 columns, 3 results, emitted by fusegen for sm_90a.
// Grid min(((x_dim0 * x_dim1 + 127) / 128) * 24, 132), block 384, 229440 bytes of shared memory.
// Reads x_dim0 * x_dim1 * 8192 + 50331648 bytes, writes x_dim0 * x_dim1 * 12288.
// x: bf16 [x_dim0, x_dim1, 4096]; weight: bf16 [6144, 4096]; q: bf16 [x_dim0, 32, x_dim1, 128]; k, v: bf16 [x_dim0, 8,
// x_dim1, 128]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.maps.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/lower_registers.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/mbarrier_arrive.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/pack_pair.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/quad_transpose.cuh"
#include "../primitives/raise_registers.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/tma_load_2d.cuh"
#include "../primitives/tma_prefetch_map.cuh"
#include "../primitives/wgmma_commit.cuh"
#include "../primitives/wgmma_descriptor.cuh"
#include "../primitives/wgmma_fence.cuh"
#include "../primitives/wgmma_wait.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// Operands that the math loads.
struct Operands {
    i32 x_dim1;
};

__device__ __forceinline__ float qkv_linear_epilogue_0(float product) {
    return product;
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue_0(const float (&product)[2], bf16 (&out)[2]) {
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = qkv_linear_epilogue_0(product[v]);
    narrow_vec(result, out);
}

// The offset of eight columns of a row in the result.
__device__ __forceinline__ i64 offset_0(const Operands& operands, i32 row, i32 head, i32 channel) {
    const i32 i0 = row / operands.x_dim1;
    const i32 i1 = row - i0 * operands.x_dim1;
    return i0 * operands.x_dim1 * 1024 + head * operands.x_dim1 * 128 + i1 * 128 + channel;
}

__device__ __forceinline__ float qkv_linear_epilogue_1(float product) {
    return product;
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue_1(const float (&product)[2], bf16 (&out)[2]) {
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = qkv_linear_epilogue_1(product[v]);
    narrow_vec(result, out);
}

// The offset of eight columns of a row in the result.
__device__ __forceinline__ i64 offset_1(const Operands& operands, i32 row, i32 head, i32 channel) {
    const i32 i0 = row / operands.x_dim1;
    const i32 i1 = row - i0 * operands.x_dim1;
    return i0 * operands.x_dim1 * 1024 + head * operands.x_dim1 * 128 + i1 * 128 + channel;
}

__device__ __forceinline__ float qkv_linear_epilogue_2(float product) {
    return product;
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue_2(const float (&product)[2], bf16 (&out)[2]) {
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = qkv_linear_epilogue_2(product[v]);
    narrow_vec(result, out);
}

// The offset of eight columns of a row in the result.
__device__ __forceinline__ i64 offset_2(const Operands& operands, i32 row, i32 head, i32 channel) {
    const i32 i0 = row / operands.x_dim1;
    const i32 i1 = row - i0 * operands.x_dim1;
    return head * operands.x_dim1 * 128 + i1 * 128 + i0 * operands.x_dim1 * 4096 + channel;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
// d (+)= A[64, 16] * B[256, 16]^T, bf16 in, fp32 out; a warpgroup executes it, both operands in shared memory.
// Warp w, lane l: d[4i + 2h + j] is row 16w + l/4 + 8h, column 8i + 2(l%4) + j. The sum replaces d unless `accumulate`.
__device__ __forceinline__ void wgmma_m64n256k16_bf16(float (&d)[128], u64 a, u64 b, i32 accumulate) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "setp.ne.b32 p, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
        " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
        " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
        " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
        " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, 0, 0;\n\t"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
          "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
          "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),
          "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]),
          "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
          "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
          "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
          "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
          "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),
          "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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
constexpr i32 CONSUMERS = 2;  // consumer warpgroups, a slab of the tile each
constexpr i32 TILE_M = SLAB * CONSUMERS;
constexpr i32 TILE_N = 256;
constexpr i32 TILE_K = LINE_BYTES / sizeof(bf16);
constexpr i32 ACCUMULATORS = TILE_N / 2;  // of a thread per slab
constexpr i32 STAGES = 4;
constexpr i32 GROUP = 8;  // rows of tiles in one swizzle group, for reuse in L2
constexpr u32 STAGE_BYTES = (TILE_M + TILE_N) * LINE_BYTES;
constexpr i32 THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr i32 BLOCKS_PER_SM = 1;  // at least; without this number, ptxas allocates registers worse
constexpr i32 SHARED_BYTES = 229440;  // that the launch reserves

// Parts of C lie side by side; each consists of whole tiles.
constexpr i32 COLUMNS_0 = 1024;
constexpr i32 COLUMNS_1 = 1024;
constexpr i32 COLUMNS_2 = 4096;
constexpr i32 WIDTH = 24;  // tiles per row of tiles

struct SharedMemory {
    bf16 a[STAGES][TILE_M * TILE_K];
    bf16 b[STAGES][TILE_N * TILE_K];
    u64 full[STAGES];   // mbarriers: TMA has filled a stage
    u64 empty[STAGES];  // mbarriers: all consumer warps have released a stage
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
};

// First row and column of a tile in its part of C.
struct Tile {
    i32 part, row, col;
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
        const i32 col = within / group_height;
        i32 begin = 0;
        tile.part = 0;
        if (col >= 4) {  // the first column of tiles of part 1
            tile.part = 1;
            begin = 4;
        }
        if (col >= 8) {  // the first column of tiles of part 2
            tile.part = 2;
            begin = 8;
        }
        tile.col = (col - begin) * TILE_N;
        index += stride;
        return true;
    }
};

// The producer thread keeps the ring full across tiles: the loads of the next tile run during the epilogue.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map_0, const TensorMap& b_map_1,
        const TensorMap& b_map_2, SharedMemory& shared, Schedule schedule, i32 depth) {
    Cursor cursor;
    for (Tile tile; schedule.next(tile);) {
        for (i32 k = 0; k < depth; k += TILE_K, cursor.advance()) {
            const i32 stage = cursor.stage;
            u64* full = &shared.full[stage];
            mbarrier_wait(&shared.empty[stage], cursor.parity ^ 1);
            mbarrier_expect(full, STAGE_BYTES);
            tma_load_2d(shared.a[stage], a_map, full, k, tile.row);
            if (tile.part == 0) tma_load_2d(shared.b[stage], b_map_0, full, k, tile.col);
            if (tile.part == 1) tma_load_2d(shared.b[stage], b_map_1, full, k, tile.col);
            if (tile.part == 2) tma_load_2d(shared.b[stage], b_map_2, full, k, tile.col);
        }
    }
}

// Releases a stage to the producer, for this warp.
__device__ __forceinline__ void release(SharedMemory& shared, i32 stage) {
    if (lane_id() == 0) mbarrier_arrive(&shared.empty[stage]);
}

// Issues the wgmma of one stage.
__device__ __forceinline__ void multiply_stage(float (&accumulator)[ACCUMULATORS], const SharedMemory& shared,
        i32 stage, i32 consumer, bool first) {
    constexpr i32 DEPTH = 16;  // of one wgmma
    constexpr u32 STEP = DEPTH * sizeof(bf16);  // bytes
    const u64 a = wgmma_descriptor(&shared.a[stage][consumer * SLAB * TILE_K], ATOM_BYTES, SLAB_BYTES);
    const u64 b = wgmma_descriptor(shared.b[stage], ATOM_BYTES, SLAB_BYTES);
    wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < TILE_K / DEPTH; ++i) {
        wgmma_m64n256k16_bf16(accumulator, wgmma_advance(a, i * STEP), wgmma_advance(b, i * STEP), !first || i > 0);
    }
    wgmma_commit();
}

// Multiplies one tile. A stage is released after the wgmma of the next stage are issued, which keeps the tensor cores
// busy.
__device__ __forceinline__ void multiply_tile(float (&accumulator)[ACCUMULATORS], SharedMemory& shared, Cursor& cursor,
        i32 depth, i32 consumer) {
    i32 previous = cursor.stage;
    mbarrier_wait(&shared.full[cursor.stage], cursor.parity);
    multiply_stage(accumulator, shared, cursor.stage, consumer, true);
    cursor.advance();
    for (i32 k = TILE_K; k < depth; k += TILE_K, cursor.advance()) {
        mbarrier_wait(&shared.full[cursor.stage], cursor.parity);
        multiply_stage(accumulator, shared, cursor.stage, consumer, false);
        wgmma_wait<1>();
        release(shared, previous);
        previous = cursor.stage;
    }
    wgmma_wait<0>(accumulator);
    release(shared, previous);
}

// Applies the epilogue of part 0 to a thread's values of a slab: pairs of columns in two rows, OCTET apart.
// A pair of 16-bit results shares a register.
// Tiles hold whole heads, so the channel of a column does not depend on the tile.
__device__ __forceinline__ void finish_tile_0(const float (&accumulator)[ACCUMULATORS], u32 (&y_0)[ACCUMULATORS / 2]) {
#pragma unroll
    for (i32 held = 0; held < ACCUMULATORS; held += 2) {
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        bf16 y_0_pair[2];
        epilogue_0(product, y_0_pair);
        y_0[held / 2] = pack_pair(y_0_pair);
    }
}

// Stores a slab of a result that is no matrix. Lanes of a quad hold alternating pairs of columns; after a
// transpose, each lane stores eight contiguous columns.
__device__ __forceinline__ void scatter_y_0(bf16* v_ptr, const u32 (&y_0)[ACCUMULATORS / 2], const Operands& operands,
        Tile tile, Place place, i64 rows) {
    const i32 quad_lane = lane_id() % QUAD;
#pragma unroll
    for (i32 first = 0; first < TILE_N; first += QUAD * OCTET) {
#pragma unroll
        for (i32 lower = 0; lower < 2; ++lower) {
            u32 pairs[QUAD];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) pairs[i] = y_0[(first / OCTET + i) * 2 + lower];
            quad_transpose(pairs);
            bf16 octet[OCTET];
            memcpy(octet, pairs, sizeof(octet));
            const Index row = tile.row + place.row + lower * OCTET;
            const Index col = first + quad_lane * OCTET;
            if (row < rows && tile.col + col < COLUMNS_0) {
                store_vec<OCTET>(v_ptr, offset_0(operands, row, (tile.col + col) / 128, col % 128), octet);
            }
        }
    }
}

// Finishes and stores a slab of part 0.
__device__ __forceinline__ void finish_0(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        bf16* v_ptr, Tile tile, Place place, i64 rows) {
    if (tile.row >= rows) return;
    u32 y_0[ACCUMULATORS / 2];
    finish_tile_0(accumulator, y_0);
    scatter_y_0(v_ptr, y_0, operands, tile, place, rows);
}

// Applies the epilogue of part 1 to a thread's values of a slab: pairs of columns in two rows, OCTET apart.
// A pair of 16-bit results shares a register.
// Tiles hold whole heads, so the channel of a column does not depend on the tile.
__device__ __forceinline__ void finish_tile_1(const float (&accumulator)[ACCUMULATORS], u32 (&y_1)[ACCUMULATORS / 2]) {
#pragma unroll
    for (i32 held = 0; held < ACCUMULATORS; held += 2) {
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        bf16 y_1_pair[2];
        epilogue_1(product, y_1_pair);
        y_1[held / 2] = pack_pair(y_1_pair);
    }
}

// Stores a slab of a result that is no matrix. Lanes of a quad hold alternating pairs of columns; after a
// transpose, each lane stores eight contiguous columns.
__device__ __forceinline__ void scatter_y_1(bf16* k_ptr, const u32 (&y_1)[ACCUMULATORS / 2], const Operands& operands,
        Tile tile, Place place, i64 rows) {
    const i32 quad_lane = lane_id() % QUAD;
#pragma unroll
    for (i32 first = 0; first < TILE_N; first += QUAD * OCTET) {
#pragma unroll
        for (i32 lower = 0; lower < 2; ++lower) {
            u32 pairs[QUAD];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) pairs[i] = y_1[(first / OCTET + i) * 2 + lower];
            quad_transpose(pairs);
            bf16 octet[OCTET];
            memcpy(octet, pairs, sizeof(octet));
            const Index row = tile.row + place.row + lower * OCTET;
            const Index col = first + quad_lane * OCTET;
            if (row < rows && tile.col + col < COLUMNS_1) {
                store_vec<OCTET>(k_ptr, offset_1(operands, row, (tile.col + col) / 128, col % 128), octet);
            }
        }
    }
}

// Finishes and stores a slab of part 1.
__device__ __forceinline__ void finish_1(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        bf16* k_ptr, Tile tile, Place place, i64 rows) {
    if (tile.row >= rows) return;
    u32 y_1[ACCUMULATORS / 2];
    finish_tile_1(accumulator, y_1);
    scatter_y_1(k_ptr, y_1, operands, tile, place, rows);
}

// Applies the epilogue of part 2 to a thread's values of a slab: pairs of columns in two rows, OCTET apart.
// A pair of 16-bit results shares a register.
// Tiles hold whole heads, so the channel of a column does not depend on the tile.
__device__ __forceinline__ void finish_tile_2(const float (&accumulator)[ACCUMULATORS], u32 (&y_2)[ACCUMULATORS / 2]) {
#pragma unroll
    for (i32 held = 0; held < ACCUMULATORS; held += 2) {
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        bf16 y_2_pair[2];
        epilogue_2(product, y_2_pair);
        y_2[held / 2] = pack_pair(y_2_pair);
    }
}

// Stores a slab of a result that is no matrix. Lanes of a quad hold alternating pairs of columns; after a
// transpose, each lane stores eight contiguous columns.
__device__ __forceinline__ void scatter_y_2(bf16* q_ptr, const u32 (&y_2)[ACCUMULATORS / 2], const Operands& operands,
        Tile tile, Place place, i64 rows) {
    const i32 quad_lane = lane_id() % QUAD;
#pragma unroll
    for (i32 first = 0; first < TILE_N; first += QUAD * OCTET) {
#pragma unroll
        for (i32 lower = 0; lower < 2; ++lower) {
            u32 pairs[QUAD];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) pairs[i] = y_2[(first / OCTET + i) * 2 + lower];
            quad_transpose(pairs);
            bf16 octet[OCTET];
            memcpy(octet, pairs, sizeof(octet));
            const Index row = tile.row + place.row + lower * OCTET;
            const Index col = first + quad_lane * OCTET;
            if (row < rows && tile.col + col < COLUMNS_2) {
                store_vec<OCTET>(q_ptr, offset_2(operands, row, (tile.col + col) / 128, col % 128), octet);
            }
        }
    }
}

// Finishes and stores a slab of part 2.
__device__ __forceinline__ void finish_2(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        bf16* q_ptr, Tile tile, Place place, i64 rows) {
    if (tile.row >= rows) return;
    u32 y_2[ACCUMULATORS / 2];
    finish_tile_2(accumulator, y_2);
    scatter_y_2(q_ptr, y_2, operands, tile, place, rows);
}

// Computes the tiles of this block.
__device__ __forceinline__ void consume(const Operands& operands, bf16* v_ptr, bf16* k_ptr, bf16* q_ptr,
        SharedMemory& shared, Schedule schedule, i64 rows, i32 depth, i32 consumer) {
    Cursor cursor;
    for (Tile tile; schedule.next(tile);) {
        float accumulator[ACCUMULATORS];
        multiply_tile(accumulator, shared, cursor, depth, consumer);

        tile.row += consumer * SLAB;
        const i32 thread = thread_id() % WARPGROUP;
        const Place place{thread / WARP * 16 + thread % WARP / QUAD, thread % QUAD * 2};  // a warp holds 16 rows
        if (tile.part == 0) finish_0(accumulator, operands, v_ptr, tile, place, rows);
        if (tile.part == 1) finish_1(accumulator, operands, k_ptr, tile, place, rows);
        if (tile.part == 2) finish_2(accumulator, operands, q_ptr, tile, place, rows);
    }
}

// Each stage is filled by one thread, and released by each warp that multiplies it.
__device__ __forceinline__ void initialise(SharedMemory& shared) {
    for (i32 stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(&shared.full[stage], 1);
        mbarrier_init(&shared.empty[stage], CONSUMERS * WARPGROUP / WARP);
    }
    mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_qkv_linear(
    const __grid_constant__ TensorMap a_map,  // of x
    const __grid_constant__ TensorMap b_map_0,  // of weight
    const __grid_constant__ TensorMap b_map_1,  // of weight
    const __grid_constant__ TensorMap b_map_2,  // of weight
    i64 rows, i64 depth,
    bf16* q_ptr,
    bf16* k_ptr,
    bf16* v_ptr,
    i64 x_dim1_extent) {
    SharedMemory& shared = *shared_array<SharedMemory>(0);
    const Schedule schedule(rows);

    if (thread_id() == 0) {
        tma_prefetch_map(a_map);
        tma_prefetch_map(b_map_0);
        tma_prefetch_map(b_map_1);
        tma_prefetch_map(b_map_2);
        initialise(shared);
    }
    block_sync();

    const i32 warpgroup = thread_id() / WARPGROUP;
    if (warpgroup == CONSUMERS) {
        lower_registers<24>();
        if (thread_id() == CONSUMERS * WARPGROUP) {
            produce(a_map, b_map_0, b_map_1, b_map_2, shared, schedule, static_cast<i32>(depth));
        }
    } else {
        raise_registers<240>();
        const Operands operands{static_cast<i32>(x_dim1_extent)};
        consume(operands, v_ptr, k_ptr, q_ptr, shared, schedule, rows, static_cast<i32>(depth), warpgroup);
    }
}
