// linear_rotary: product with epilogue by mma.sync, emitted by fusegen for sm_80.
// Grid ((x_dim0 + 127) // 128) * 32, block 128, 65536 bytes of shared memory.
// Reads x_dim0 * 16384 + 33554432 bytes, writes x_dim0 * 8192.
// ---------------------------------------------------------------------------------------------------------------------
// Primitives
// ---------------------------------------------------------------------------------------------------------------------
// Fixed-width scalars, so that the file needs no header. bf16 and f16 are storage only: math widens them first.
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
  return static_cast<i32>(blockIdx.x);
}

// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
  __syncthreads();
}

// Closes a group of this thread's asynchronous copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Starts copying the first `count` of W elements (aligned to their size, 16 bytes at most) from global to shared memory; zeros
// follow. Fewer than 4 bytes are copied by way of a register, at once; see copy_async_wait.
template <int W, typename T>
__device__ __forceinline__ void copy_async_some(u32 to, const T* base, i64 j, i32 count) {
  constexpr i32 bytes = W * sizeof(T);
  const u32 present = static_cast<u32>(count) * sizeof(T);
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(base + j), "r"(present) : "memory");
  } else if constexpr (bytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(base + j), "n"(bytes), "r"(present) : "memory");
  } else {
    static_assert(bytes == 2, "what is no multiple of 4 bytes is copied one 16-bit element at a time");
    u16 bits = 0;
    if (count > 0) asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + j));
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
  }
}

// Waits until at most PENDING of this thread's groups of copies are under way; it may then read what the others brought.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
  return static_cast<i32>(threadIdx.x & 31u);
}

// Four matrices of 8 x 8 16-bit values from shared memory; lane 8 i + r says where row r of matrix i lies, 16 aligned bytes. Of
// matrix i, lane l gets row l / 4, columns 2 (l % 4) and the next one. All 32 lanes take part.
__device__ __forceinline__ void ldmatrix(u32 (&matrices)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
__device__ __forceinline__ bf16 load_once(const bf16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}

// d += A[16, 16] * B[8, 16]^T, bf16 in, fp32 out; a warp executes it, operands as ldmatrix gives them: of A the matrices (upper,
// left), (lower, left), (upper, right), (lower, right), of B left and right. Lane l: d[2h + j] is row l / 4 + 8h, column 2 (l % 4) + j.
__device__ __forceinline__ void mma_m16n8k16_bf16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_left), "r"(b_right));
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}

// narrow() for arrays; 16-bit floats are converted in pairs, one instruction for two elements.
template <int N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
template <int N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], bf16 (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[k + 1]), "f"(src[k]));
    memcpy(&dst[k], &pair, sizeof(pair));
  }
  if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}

// The bits of two 16-bit values in one register, the first in the lower half.
template <typename Half>
__device__ __forceinline__ float pack_pair(const Half (&pair)[2]) {
    return __uint_as_float(u32(pair[0].bits) | u32(pair[1].bits) << 16);
}

// The value that the lane with index `lane_id() ^ mask` passes. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Transposes the 4x4 words that the four lanes of a quad hold: word i of lane t becomes word t of lane i.
template <typename Word>
__device__ __forceinline__ void quad_transpose(Word (&words)[4]) {
#pragma unroll
    for (i32 bit = 2; bit > 0; bit /= 2) {
        const bool upper = lane_id() & bit;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const Word received = shuffle_xor(upper ? words[i] : words[i | bit], bit);
            words[i] = upper ? received : words[i];
            words[i | bit] = upper ? words[i | bit] : received;
        }
    }
}

// Shared-memory address: the 32-bit form of a pointer to shared memory that PTX operands expect.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The part of the block's dynamic shared memory that starts at `byte_offset`, as an array of T. Take it with `auto`.
template <typename T>
__device__ __forceinline__ T* shared_array(u32 byte_offset) {
  extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory + byte_offset);
}

// Bytes of one memory access to a run of `bytes` bytes: the largest power of two that divides it, at most 16.
// It is also the alignment that load_vec and store_vec ask for.
__device__ __forceinline__ constexpr i32 vector_width(i32 bytes) {
  return bytes % 16 == 0 ? 16 : bytes & -bytes;
}

// N consecutive elements to global memory, in accesses of vector_width(N * sizeof(T)) bytes, to which they are aligned.
template <int N, typename T>
__device__ __forceinline__ void store_vec(T* base, i64 i, const T (&src)[N]) {
  constexpr i32 bytes = N * sizeof(T);
  constexpr i32 width = vector_width(bytes);
  static_assert(width == 16, "no other accesses were expected");
  if constexpr (width == 16) {
    u32* to = reinterpret_cast<u32*>(base + i);
    u32 words[bytes / 4];
    memcpy(words, src, bytes);
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :: "l"(to + w), "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3]) : "memory");
  }
}

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// What the math reads besides what it is called with.
struct Operands {
    const bf16* cos_ptr;
    const bf16* sin_ptr;
};

__device__ __forceinline__ void linear_rotary_epilogue(const float (&product)[2], float cos_, float sin_, float& out_0, float& out_1) {
    out_0 = product[0] * cos_ - product[1] * sin_;                                    // line 8: return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(…
    out_1 = product[1] * cos_ + product[0] * sin_;
}

// Finishes two neighbouring columns of a row.
__device__ __forceinline__ void epilogue(const Operands& operands, const float (&product)[2], i32 row, i32 col,
                                         bf16 (&out)[2]) {
    const float cos_ = widen(load_once(operands.cos_ptr, row * 2048 + (col / 2)));
    const float sin_ = widen(load_once(operands.sin_ptr, row * 2048 + (col / 2)));
    float result[2];
    linear_rotary_epilogue(product, cos_, sin_, result[0], result[1]);
    narrow_vec(result, out);
}

// Of eight columns of a row in the result.
__device__ __forceinline__ i64 offset(const Operands& operands, i32 row, i32 col) {
    return row * 4096 + col;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
// Tiles of C are TILE_M x TILE_N; one stage of the ring holds TILE_K of the depth.
constexpr i32 WARPS_M = 2, WARPS_N = 2;
constexpr i32 WARP_M = 64, WARP_N = 64;  // what a warp multiplies
constexpr i32 TILE_M = WARPS_M * WARP_M;
constexpr i32 TILE_N = WARPS_N * WARP_N;
constexpr i32 TILE_K = 32;
constexpr i32 PRODUCTS = 1;  // matrices B that meet the same A
constexpr i32 STAGES = 4;
constexpr i32 GROUP = 8;  // rows of tiles that are walked together, so that L2 keeps what they share

constexpr i32 THREADS = 128;
constexpr i32 BLOCKS_PER_SM = 2;
constexpr i32 SLAB = 16;  // rows of one instruction
constexpr i32 SLABS = WARP_M / SLAB;
constexpr i32 DEPTH = 16;  // of one instruction
constexpr i32 STEPS = TILE_K / DEPTH;
static_assert(STEPS % 2 == 0, "fragments take turns, also from one stage to the next");
constexpr i32 RESULTS = WARP_N / 2;  // of a thread in a slab, of each product
constexpr i32 ACCUMULATORS = PRODUCTS * RESULTS;
using Index = i32;
constexpr i32 OCTET = 8;  // columns that the four lanes of a row hold side by side; values in 16 bytes
constexpr i32 UNIT_BYTES = 16;
constexpr i32 STAGE_BYTES = 8192 + PRODUCTS * 8192;
static_assert(STAGES * STAGE_BYTES <= 65536, "the plan reserves less shared memory than the pipeline uses");

constexpr i32 COLUMNS = 4096;
constexpr i32 WIDTH = 32;  // tiles side by side

// First row and column of a tile.
struct Tile {
    i32 row, col;
};

// Row and column, within 16 rows of a warp, of the first value that a thread holds.
struct Place {
    i32 row, col;
};

// An operand in memory: lines along which elements are contiguous.
struct Matrix {
    const bf16* data;
    i64 stride;  // from line to line
};

// The tile of a block, in an order that goes down GROUP rows before it goes right.
__device__ __forceinline__ Tile tile_of(i64 rows, i32 index) {
    const i32 height = static_cast<i32>((rows + TILE_M - 1) / TILE_M);  // of C in tiles
    Tile tile;
    const i32 group_size = GROUP * WIDTH;
    const i32 first = index / group_size * GROUP;
    const i32 group_height = min(GROUP, height - first);
    const i32 within = index % group_size;
    tile.row = (first + within % group_height) * TILE_M;
    tile.col = within / group_height * TILE_N;
    return tile;
}

// Byte, in a tile of shared memory, of 16 bytes of a line. Neighbouring units of one line, and equal units of eight neighbouring
// lines, lie in different banks.
template <u32 UNITS>
__device__ __forceinline__ u32 unit_byte(u32 line, u32 unit) {
    constexpr u32 LINES = UNITS < OCTET ? OCTET / UNITS : 1;  // that all banks hold side by side
    constexpr u32 MASK = UNITS < OCTET ? UNITS - 1 : OCTET - 1;
    return (line * UNITS + (unit ^ (line / LINES & MASK))) * UNIT_BYTES;
}

// What a thread copies of LINES lines of LENGTH elements in each stage: one unit of every STEP-th line, WIDTH elements at once. In the
// tile, lines have room for UNITS units.
template <i32 LINES, i32 LENGTH, i32 UNITS, i32 WIDTH>
struct Copier {
    static constexpr i32 STEP = THREADS / UNITS;
    static constexpr i32 COPIES = LINES / STEP;
    static_assert(THREADS % UNITS == 0 && LINES % STEP == 0 && STEP % OCTET == 0, "threads copy equally much, and swizzled alike");

    const bf16* next;
    i64 step;         // to the next line that the thread copies
    i32 lines, left;  // that there are from the thread's first line, and from its first element, on

    __device__ __forceinline__ Copier(const Matrix& matrix, i64 line, i64 element, i64 line_count, i64 length) {
        line += thread_id() / UNITS;
        element += thread_id() % UNITS * OCTET;
        next = matrix.data + line * matrix.stride + element;
        step = matrix.stride * STEP;
        lines = static_cast<i32>(line_count - line);
        left = thread_id() % UNITS * OCTET < LENGTH ? static_cast<i32>(length - element) : 0;
    }

    // Starts copying the thread's part of a stage; zeros stand for what there is not.
    __device__ __forceinline__ void copy(u32 tile) const {
        const u32 to = tile + unit_byte<UNITS>(thread_id() / UNITS, thread_id() % UNITS);
#pragma unroll
        for (i32 i = 0; i < COPIES; ++i) {
#pragma unroll
            for (i32 e = 0; e < OCTET; e += WIDTH) {
                const i32 count = i * STEP < lines && e < left ? min(left - e, WIDTH) : 0;
                copy_async_some<WIDTH>(to + i * (STEP * UNITS * UNIT_BYTES) + e * sizeof(bf16), next, i * step + e, count);
            }
        }
    }

    // Goes on to the next stage: along the lines, or to further ones.
    __device__ __forceinline__ void advance_along() {
        next += LENGTH;
        left -= LENGTH;
    }
    __device__ __forceinline__ void advance_across() {
        next += COPIES * step;
        lines -= LINES;
    }
};

// What a thread copies of A and of the matrices that meet it.
struct Copiers {
    Copier<TILE_M, TILE_K, TILE_K / OCTET, 8> a;
    Copier<TILE_N, TILE_K, TILE_K / OCTET, 8> b[PRODUCTS];

    // Starts copying one stage.
    __device__ __forceinline__ void copy(u32 stage) {
        a.copy(stage);
        a.advance_along();
#pragma unroll
        for (i32 product = 0; product < PRODUCTS; ++product) {
            b[product].copy(stage + 8192 + product * 8192);
            b[product].advance_along();
        }
    }
};

// What one step of a warp multiplies: A in slabs of 16 rows, B in pairs of octets of columns.
struct Fragments {
    u32 a[SLABS][4];
    u32 b[PRODUCTS][WARP_N / (2 * OCTET)][4];
};

// Fetches the operands of one step from a stage.
__device__ __forceinline__ void load_fragments(Fragments& fragments, u32 stage, i32 step, i32 warp_row, i32 warp_col) {
    const i32 row = lane_id() % 8, odd = lane_id() / 8 % 2, upper = lane_id() / 16;  // of the matrix that a lane points into
#pragma unroll
    for (i32 slab = 0; slab < SLABS; ++slab) {
        const i32 first = warp_row + slab * SLAB;
        ldmatrix(fragments.a[slab], stage + unit_byte<TILE_K / OCTET>(first + odd * 8 + row, step * 2 + upper));
    }
#pragma unroll
    for (i32 product = 0; product < PRODUCTS; ++product) {
        const u32 b = stage + 8192 + product * 8192;
#pragma unroll
        for (i32 pair = 0; pair < WARP_N / (2 * OCTET); ++pair) {
            const i32 first = warp_col + pair * 2 * OCTET;
            ldmatrix(fragments.b[product][pair], b + unit_byte<TILE_K / OCTET>(first + upper * 8 + row, step * 2 + odd));
        }
    }
}

// Issues the products of one step.
__device__ __forceinline__ void multiply_step(float (&accumulator)[SLABS][ACCUMULATORS], const Fragments& fragments) {
#pragma unroll
    for (i32 slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (i32 octet = 0; octet < ACCUMULATORS / 4; ++octet) {
            const i32 product = octet / (WARP_N / OCTET), within = octet % (WARP_N / OCTET);
            const u32 (&b)[4] = fragments.b[product][within / 2];
            mma_m16n8k16_bf16(&accumulator[slab][octet * 4], fragments.a[slab], b[within % 2 * 2], b[within % 2 * 2 + 1]);
        }
    }
}

// The ring of stages in shared memory, and the stage that comes behind another one.
struct Ring {
    u32 begin;

    __device__ __forceinline__ u32 after(u32 stage) const {
        return stage + STAGE_BYTES < begin + STAGES * STAGE_BYTES ? stage + STAGE_BYTES : begin;
    }
};

// Multiplies one tile. What a step multiplies is fetched during the step before, and a stage is filled again once all warps have
// fetched what it held: the barrier that precedes the last step of a stage says so, and that the next one has come.
__device__ __forceinline__ void multiply_tile(float (&accumulator)[SLABS][ACCUMULATORS], Copiers copiers, i64 depth, i32 warp_row,
                                              i32 warp_col) {
    const i32 count = static_cast<i32>((depth + TILE_K - 1) / TILE_K);
    const Ring ring{shared_address(&*shared_array<u8>(0))};
    u32 stage = ring.begin, filled = ring.begin;
#pragma unroll
    for (i32 ahead = 0; ahead < STAGES - 1; ++ahead, filled = ring.after(filled)) {
        if (ahead < count) copiers.copy(filled);
        copy_async_commit();
    }
    copy_async_wait<STAGES - 2>();
    block_sync();
    Fragments fragments[2];
    if (count > 0) load_fragments(fragments[0], stage, 0, warp_row, warp_col);
    for (i32 number = 0; number < count; ++number) {
#pragma unroll
        for (i32 step = 0; step < STEPS; ++step) {
            if (step == STEPS - 1) {
                copy_async_wait<STAGES - 2>();
                block_sync();
                stage = ring.after(stage);
            }
            if (step < STEPS - 1 || number + 1 < count) {
                load_fragments(fragments[(step + 1) % 2], stage, (step + 1) % STEPS, warp_row, warp_col);
            }
            if (step == 0) {
                if (number + STAGES - 1 < count) copiers.copy(filled);
                copy_async_commit();
                filled = ring.after(filled);
            }
            multiply_step(accumulator, fragments[step % 2]);
        }
    }
}

// What a thread holds of 16 rows of a warp, finished; what lies outside of C is left out.
// A pair of 16-bit results shares a register.
// A tile that is INSIDE has no tests and hence no branches, so that the loads of many operands are in flight together.
template <bool INSIDE>
__device__ __forceinline__ void finish_tile(const float (&accumulator)[ACCUMULATORS], const Operands& operands, Tile tile,
                                            Place place, i64 rows, float (&y)[RESULTS / 2]) {
#pragma unroll
    for (i32 held = 0; held < RESULTS; held += 2) {
        const Index row = tile.row + place.row + held / 2 % 2 * 8;
        const Index col = place.col + held / 4 * OCTET;
        if (!INSIDE && (row >= rows || tile.col + col >= COLUMNS)) continue;
        const float product[2] = {accumulator[held], accumulator[held + 1]};
        bf16 y_pair[2];
        epilogue(operands, product, row, tile.col + col, y_pair);
        y[held / 2] = pack_pair(y_pair);
    }
}

// Stores 16 rows of a warp of a result. Lanes of a quad hold alternating pairs of columns; exchanged, each
// stores eight that are contiguous.
__device__ __forceinline__ void scatter_y(bf16* out, const float (&words)[RESULTS / 2], const Operands& operands,
                                            Tile tile, Place place, i64 rows) {
    constexpr i32 QUAD = 4;
    const i32 quad_lane = lane_id() % QUAD;
#pragma unroll
    for (i32 first = 0; first < WARP_N; first += QUAD * OCTET) {
#pragma unroll
        for (i32 lower = 0; lower < 2; ++lower) {
            u32 pairs[QUAD];
#pragma unroll
            for (i32 i = 0; i < QUAD; ++i) memcpy(&pairs[i], &words[(first / OCTET + i) * 2 + lower], sizeof(pairs[i]));
            quad_transpose(pairs);
            bf16 octet[OCTET];
            memcpy(octet, pairs, sizeof(octet));
            const Index row = tile.row + place.row + lower * 8;
            const Index col = first + quad_lane * OCTET;
            if (row < rows && tile.col + col < COLUMNS) {
                store_vec<OCTET>(out, offset(operands, row, tile.col + col), octet);
            }
        }
    }
}

// Finishes and stores 16 rows of a warp.
__device__ __forceinline__ void finish(const float (&accumulator)[ACCUMULATORS], const Operands& operands,
                                       bf16* out_ptr, Tile tile, Place place, i64 rows) {
    const bool inside = tile.row + SLAB <= rows && tile.col + WARP_N <= COLUMNS;
    float y[RESULTS / 2];
    if (inside) {
        finish_tile<true>(accumulator, operands, tile, place, rows, y);
    } else {
        finish_tile<false>(accumulator, operands, tile, place, rows, y);
    }
    scatter_y(out_ptr, y, operands, tile, place, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fg_linear_rotary(
    i64 rows, i64 depth, i64 a_offset, i64 a_pitch,
    i64 b_offset, i64 b_pitch,
    bf16* out_ptr,
    const bf16* x_ptr,
    const bf16* weight_ptr,
    const bf16* cos_ptr,
    const bf16* sin_ptr) {
    Tile tile = tile_of(rows, block_id());
    const Matrix a{x_ptr + a_offset, a_pitch};
    const Matrix b[PRODUCTS] = {{weight_ptr + b_offset, b_pitch}};
    const i32 columns = COLUMNS;
    const Copiers copiers{
        Copier<TILE_M, TILE_K, TILE_K / OCTET, 8>(a, tile.row, 0, rows, depth),
        {Copier<TILE_N, TILE_K, TILE_K / OCTET, 8>(b[0], tile.col, 0, columns, depth)},
    };
    const i32 warp = thread_id() / 32;
    const i32 warp_row = warp / WARPS_N * WARP_M, warp_col = warp % WARPS_N * WARP_N;
    float accumulator[SLABS][ACCUMULATORS] = {};
    multiply_tile(accumulator, copiers, depth, warp_row, warp_col);

    const Operands operands{cos_ptr, sin_ptr};
    const Place place{lane_id() / 4, lane_id() % 4 * 2};
    tile.row += warp_row;
    tile.col += warp_col;
#pragma unroll
    for (i32 slab = 0; slab < SLABS; ++slab, tile.row += SLAB) {
        finish(accumulator[slab], operands, out_ptr, tile, place, rows);
    }
}
