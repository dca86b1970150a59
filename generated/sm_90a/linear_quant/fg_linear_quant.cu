// linear_quant: matmul with epilogue, emitted by fusegen for sm_90a.
// Grid min(((input_dim0 + 127) / 128) * 86, 132), block 384, 196688 bytes of shared memory.
// Reads input_dim0 * 8192 + 134250500 bytes, writes input_dim0 * 16384.
// input: bf16 [input_dim0, 4096]; weight: bf16 [16384, 4096]; out: f8e4m3 [input_dim0, 16384]; bias: bf16 [16384];
// scale: float []; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.f8e4m3.maps.cuh"
#include "../primitives/block_count.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/block_sync.cuh"
#include "../primitives/fast_divide.cuh"
#include "../primitives/fast_exp.cuh"
#include "../primitives/fast_reciprocal.cuh"
#include "../primitives/lane_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.f8e4m3.bf16.float.cuh"
#include "../primitives/widen_e4m3x2.cuh"
#include "../primitives/widen.f8e4m3.bf16.float.cuh"
#include "../primitives/widen_vec.f8e4m3.bf16.cuh"
#include "../primitives/load_wide.cuh"
#include "../primitives/lower_registers.cuh"
#include "../primitives/maximum.i64.float.cuh"
#include "../primitives/shared_address.cuh"
#include "../primitives/mbarrier_arrive.cuh"
#include "../primitives/mbarrier_expect.cuh"
#include "../primitives/mbarrier_init.cuh"
#include "../primitives/mbarrier_init_fence.cuh"
#include "../primitives/mbarrier_wait.cuh"
#include "../primitives/minimum.i64.float.cuh"
#include "../primitives/narrow.f8e4m3.bf16.cuh"
#include "../primitives/narrow_vec.f8e4m3.bf16.cuh"
#include "../primitives/opaque.cuh"
#include "../primitives/pack_bytes.cuh"
#include "../primitives/shuffle_xor.cuh"
#include "../primitives/quad_transpose.cuh"
#include "../primitives/raise_registers.cuh"
#include "../primitives/shared_array.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/store_vec.8.cuh"
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
// linear_quant in fusegen/specs/quantization.py; its def is line 1:
//   17: y = activate(F.linear(input, weight, bias), activation)
// gelu_of in fusegen/specs/elementwise.py; its def is line 1:
//    8: return F.gelu(x, approximate=approximate)
// _raised in fusegen/specs/quantization.py; its def is line 1:
//    3: factor = torch.where(scale.abs() < 2.0**-100, 2.0**64, 1.0)
//    4: return x * factor, dtype, scale * factor
// narrowed in fusegen/specs/quantization.py; its def is line 1:
//    9: values = (x.float() * inverse_scale).clamp(-largest, largest)

// Operands that the math loads.
struct Operands {
    const bf16* bias_ptr;
    const float* scale_ptr;
};

// gelu in its tanh form, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2u).
__device__ __forceinline__ float linear_quant_epilogue(float product, float bias, float scale) {
    const float sum = product + bias;                                                 // linear_quant, line 17
    const float product_2 = sum * (1.5957692f + 0.071354814f * (sum * sum));          // gelu_of, line 8
    const float factor = fabsf(scale) < 7.888609e-31f ? 1.8446744e+19f : 1.0f;        // _raised, line 3
    const float product_3 = sum * fast_reciprocal(1.0f + fast_exp(-product_2)) * factor;  // _raised, line 4
    const float clamped = maximum(product_3 * fast_divide(1.0f, scale * factor), -448.0f);  // narrowed, line 9
    return minimum(clamped, 448.0f);
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue(const Operands& operands, const float (&product)[2], i32 col,
        f8e4m3 (&out)[2]) {
    float bias[2];
    load_wide(bias, operands.bias_ptr, col);
    const float scale = load(operands.scale_ptr, 0);
    float result[2];
#pragma unroll
    for (i32 v = 0; v < 2; ++v) result[v] = linear_quant_epilogue(product[v], bias[v], scale);
    narrow_vec(result, out);
}

// The offset of eight columns of a row in the result.
__device__ __forceinline__ i64 offset(i32 row, i32 col) {
    return row * 16384 + col;
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

constexpr i32 COLUMNS = 16384;
constexpr i32 WIDTH = 86;  // tiles per row of tiles

struct SharedMemory {
    bf16 a[STAGES][TILE_M * TILE_K];
    bf16 b[STAGES][TILE_N * TILE_K];
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

// A row or column, or the last one in place of those outside of C, where results are not stored: an epilogue without
// branches keeps many loads of operands in flight.
template <bool INSIDE>
__device__ __forceinline__ Index nearest(Index position, i64 last) {
    return INSIDE ? position : min(position, static_cast<Index>(last));
}

// Applies the epilogue to a thread's values of a slab: pairs of columns in two rows, OCTET apart.
// A pair of 8-bit results shares a register.
// INSIDE: no column lies outside of C.
template <bool INSIDE>
__device__ __forceinline__ void finish_tile(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        Tile tile, Place place, u32 (&y)[ACCUMULATORS / 2]) {
    constexpr i32 LAST_PAIR = COLUMNS - 2;
#pragma unroll
    for (i32 held = 0; held < ACCUMULATORS; held += 2) {
        const Index col = nearest<INSIDE>(place.col + held / 4 * OCTET, LAST_PAIR - tile.col);
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        f8e4m3 y_pair[2];
        epilogue(operands, product, tile.col + col, y_pair);
        y[held / 2] = pack_bytes(y_pair);
    }
}

// Stores a slab of a result of 8 bits. Lanes of a quad hold alternating pairs of columns; after a
// transpose, each lane stores eight contiguous columns.
__device__ __forceinline__ void scatter_y(f8e4m3* out_ptr, const u32 (&y)[ACCUMULATORS / 2], Tile tile, Place place,
        i64 rows) {
    const i32 quad_lane = lane_id() % QUAD;
#pragma unroll
    for (i32 first = 0; first < TILE_N; first += QUAD * OCTET) {
#pragma unroll
        for (i32 lower = 0; lower < 2; ++lower) {
            u32 pairs[QUAD];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) pairs[i] = y[(first / OCTET + i) * 2 + lower];
            quad_transpose(pairs);
            f8e4m3 octet[OCTET];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) memcpy(&octet[2 * i], &pairs[i], 2);
            const Index row = tile.row + place.row + lower * OCTET;
            const Index col = first + quad_lane * OCTET;
            if (row < rows && tile.col + col < COLUMNS) {
                store_vec<OCTET>(out_ptr, offset(row, tile.col + col), octet);
            }
        }
    }
}

// Finishes and stores a slab.
__device__ __forceinline__ void finish(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
        f8e4m3* out_ptr, Tile tile, Place place, i64 rows) {
    if (tile.row >= rows) return;
    u32 y[ACCUMULATORS / 2];
    if (tile.col + TILE_N <= COLUMNS) {
        finish_tile<true>(accumulator, operands, tile, place, y);
    } else {
        finish_tile<false>(accumulator, operands, tile, place, y);
    }
    scatter_y(out_ptr, y, tile, place, rows);
}

// Computes every second tile of this block. A warpgroup multiplies while the other one applies its epilogue: it waits
// for its turn, which the other one gives when all wgmma of its tile are issued, and skips the stages of that tile.
// Without turns, it could take these stages for its own, since the parity of an mbarrier repeats after two phases.
__device__ __forceinline__ void consume(const Operands& operands, f8e4m3* out_ptr, SharedMemory& shared,
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

#pragma unroll
        for (i32 slab = 0; slab < SLABS; ++slab, tile.row += SLAB) {
            // Opaque: the compiler would compute addresses before the matmul, and these would take registers during it.
            const i32 thread = opaque(thread_id() % WARPGROUP);
            const Place place{thread / WARP * 16 + thread % WARP / QUAD, thread % QUAD * 2};  // a warp holds 16 rows
            finish(accumulator[slab], operands, out_ptr, tile, place, rows);
        }
    }
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
fg_linear_quant(
    const __grid_constant__ TensorMap a_map,  // of input
    const __grid_constant__ TensorMap b_map,  // of weight
    i64 rows, i64 depth,
    f8e4m3* out_ptr,
    const bf16* bias_ptr,
    const float* scale_ptr) {
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
        const Operands operands{bias_ptr, scale_ptr};
        consume(operands, out_ptr, shared, schedule, rows, static_cast<i32>(depth), warpgroup);
    }
}
