// linear_cross_entropy_rows_0_1: row reduction, 3 phases, rows read once, staged in shared memory, emitted by fusegen for sm_90a.
// Grid min(block_rows_0, 264) * 1, block 512, 107008 bytes of shared memory: a row lies in the shared memory of a block while the next ones come.
// Reads (0 + min(block_rows_0, 4096) * 8) + min(block_rows_0, block_rows_0 * 32000) * 2 bytes, writes block_rows_0 * 2.
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

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
  return static_cast<i32>(blockIdx.x);
}

// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
  __syncthreads();
}

// Ends the launch: the next synchronisation raises cudaErrorAssert, and the message is printed.
extern "C" __device__ void __assertfail(const char*, const char*, u32, const char*, unsigned long) __attribute__((noreturn));
__device__ __noinline__ void refuse_index(const char* message) { __assertfail(message, "fusegen", 0, "", 1); }

// An index that was read, if it is in [0, extent); else the launch ends with a device assert.
__device__ __forceinline__ i64 checked_index(i64 index, i64 extent, const char* message) {
  if (index < 0 || index >= extent) refuse_index(message);
  return index;
}

// Shared-memory address: the 32-bit form of a pointer to shared memory that PTX operands expect.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Starts copying W elements (4, 8 or 16 bytes, aligned so) from global to shared memory; see copy_async_wait. Those of 16 bytes
// leave the first-level cache to what is read again.
template <int W, typename T>
__device__ __forceinline__ void copy_async(T* to, i32 i, const T* base, i64 j) {
  if constexpr (W * sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(base + j));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to + i)), "l"(base + j), "n"(W * sizeof(T)));
  }
}

// Closes a group of this thread's asynchronous copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most PENDING of this thread's groups of copies are under way; it may then read what the others brought.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// e^x within about 2 + |1.2 x| units in the last place; subnormal results become zero.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
  return static_cast<i32>(threadIdx.x & 31u);
}

// One element from global memory. Never the read-only path: outputs may alias inputs.
__device__ __forceinline__ i64 load(const i64* base, i64 i) {
  u64 bits;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
__device__ __forceinline__ bf16 load(const bf16* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}

// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
__device__ __forceinline__ i64 load_once(const i64* base, i64 i) {
  u64 bits;
  asm("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
__device__ __forceinline__ bf16 load_once(const bf16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}

// The larger of two values; NaN if either is NaN.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }

// The part of the block's dynamic shared memory that starts at `byte_offset`, as an array of T. Take it with `auto`.
template <typename T>
__device__ __forceinline__ T* shared_array(u32 byte_offset) {
  extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory + byte_offset);
}

// Element i of an array in this block's shared memory.
template <typename T>
__device__ __forceinline__ T shared_load(const T* array, i32 i) {
  return array[i];
}

// N consecutive elements from shared memory, aligned to their size (16 bytes at most).
template <int N, typename T>
__device__ __forceinline__ void shared_load_vec(T (&dst)[N], const T* from, i32 i) {
  constexpr i32 bytes = N * sizeof(T);
  if constexpr (bytes % 16 != 0) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) dst[k] = shared_load(from, i + k);
  } else {
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3])
                   : "r"(shared_address(from + i) + w * 4));
    }
    memcpy(dst, words, bytes);
  }
}

// Sets element i of an array in this block's shared memory.
template <typename T>
__device__ __forceinline__ void shared_store(T* array, i32 i, T value) {
  array[i] = value;
}

// The value that the lane with index `lane_id() ^ mask` passes. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// One element to global memory.
__device__ __forceinline__ void store(i64* base, i64 i, i64 value) {
  u64 bits = bit_cast<u64>(value);
  asm volatile("st.global.b64 [%0], %1;" :: "l"(base + i), "l"(bits) : "memory");
}
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
  u16 bits = bit_cast<u16>(value);
  asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
}

// Index of this thread's warp in its block.
__device__ __forceinline__ i32 warp_id() {
  return static_cast<i32>(threadIdx.x >> 5);
}

// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
__device__ __forceinline__ float widen(bf16 x) {
  return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
__device__ __forceinline__ i64 widen(i64 x) { return x; }

// widen() for arrays; bf16 comes in pairs, one instruction for each element.
template <int N, typename From, typename To>
__device__ __forceinline__ void widen_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k < N; ++k) dst[k] = widen(src[k]);
}
template <int N>
__device__ __forceinline__ void widen_vec(const bf16 (&src)[N], float (&dst)[N]) {
#pragma unroll
  for (i32 k = 0; k + 1 < N; k += 2) {
    u32 pair;
    memcpy(&pair, &src[k], sizeof(pair));
    dst[k] = bit_cast<float>(pair << 16);
    dst[k + 1] = bit_cast<float>(pair & 0xffff0000u);
  }
  if constexpr (N % 2 != 0) dst[N - 1] = widen(src[N - 1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
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

__device__ __forceinline__ float linear_cross_entropy_rows_0_1_1(float value_4, float largest) {
    return fast_exp(value_4 - largest);                                               // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
}

__device__ __forceinline__ float linear_cross_entropy_rows_0_1_row_2(float value_4_2, float largest, float total) {
    return value_4_2 - largest - logf(total);
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 512;  // that share a row
constexpr i32 WARPS = 16;
constexpr i32 MEETING = 16;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before
constexpr i32 CHUNKS = 8;  // groups of lanes that a thread holds
constexpr i32 SLOTS = 13;  // groups of lanes that a thread has room for in shared memory, used in turn
constexpr i32 AHEAD = SLOTS - CHUNKS;  // how many of them belong to later rows
constexpr i32 SLOT = THREADS * LANES;  // elements from one slot to the next

// Leaves a warp's part of what the threads of a row combine; row_amax_f32_meet takes all parts, behind a barrier.
template <typename Scratch>
__device__ __forceinline__ void row_amax_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the parts of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_amax_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = amax_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

// Leaves a warp's part of what the threads of a row combine; row_sum_f32_meet takes all parts, behind a barrier.
template <typename Scratch>
__device__ __forceinline__ void row_sum_f32_leave(float value, Scratch scratch) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() == 0) shared_store(scratch, warp_id(), value);
}

// Combines the parts of all warps; every thread receives the result.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32_meet(Scratch scratch) {
    const i32 warp = lane_id() % MEETING;
    float value = shared_load(scratch, warp);
#pragma unroll
    for (i32 mask = MEETING / 2; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __launch_bounds__(512, 2)
fg_linear_cross_entropy_rows_0_1(const bf16* value_4_ptr, const i64* operand_0_ptr, bf16* result_0_ptr, i64 block_rows_0, i64 block_start_0) {
    const Index row_count = block_rows_0;
    const Index column_count = 32000;
    const i32 thread = thread_id();
    // This block's share of the rows.
    constexpr i32 PARTS = 264;  // at most: there are no blocks without rows
    const Index part = block_id();
    i32 turn = 0;  // rows alternate between two slots of scratch, so that one barrier a phase is enough
    auto value_4_staged = shared_array<bf16>(512);
    i32 base = 0;  // the slot of the row's first group
    const auto slot_of = [&](i32 c) { return base + c < SLOTS ? base + c : base + c - SLOTS; };
    // Starts the copy of group c of a row; one that does not exist still counts as a group of copies.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < column_count) {
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(value_4_staged, slot * SLOT + thread * LANES + v, value_4_ptr, row * 32000 + column + v);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();
        const Index value_at = checked_index(widen(load_once(operand_0_ptr, block_start_0 + row)), 32000, "fusegen: linear_cross_entropy_rows_0_1: index of a computed tensor out of range [0, 32000)");

        // Phase 1 of 3: reduces each row to largest.
        const float value_4_2 = widen(load(value_4_ptr, row * 32000 + value_at));
        float largest_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float value_4[LANES];
            bf16 value_4_raw[LANES];
            shared_load_vec(value_4_raw, value_4_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(value_4_raw, value_4);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], value_4[v]);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) largest_of[k] = amax_f32_combine(largest_of[k], largest_of[k + half]);
        }
        float largest = largest_of[0];
        row_amax_f32_leave(largest, shared_array<float>(0) + turn * WARPS);
        block_sync();
        largest = row_amax_f32_meet(shared_array<float>(0) + turn * WARPS);

        // Phase 2 of 3: reduces each row to total.
        float total_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            float value_4[LANES];
            bf16 value_4_raw[LANES];
            shared_load_vec(value_4_raw, value_4_staged, slot_of(c) * SLOT + thread * LANES);
            widen_vec(value_4_raw, value_4);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the slot is free again
            float total_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                total_part[v] = linear_cross_entropy_rows_0_1_1(value_4[v], largest);
                total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
            }
        }
#pragma unroll
        for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
            for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
        }
        float total = total_of[0];
        row_sum_f32_leave(total, shared_array<float>(256) + turn * WARPS);
        block_sync();
        total = row_sum_f32_meet(shared_array<float>(256) + turn * WARPS);

        // Phase 3 of 3: computes row_value; writes result_0.
        const float row_value = linear_cross_entropy_rows_0_1_row_2(value_4_2, largest, total);
        if (thread == 0) {
            bf16 narrowed;
            narrow(row_value, narrowed);
            store(result_0_ptr, block_start_0 + row, narrowed);
        }
        turn ^= 1;
        base = slot_of(CHUNKS);
    }
}
