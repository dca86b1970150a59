// cross_entropy_0: row reduction, 3 phases, rows read once, staged in shared memory, emitted by fusegen for sm_90a.
// Grid min(8192, 132) * 1, block 512, 131584 bytes of shared memory: a row lies in the shared memory of a block while the next ones come.
// Reads 524288000 bytes, writes 65536.
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
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

// The value itself, but the compiler no longer knows where it comes from: what depends on it is not hoisted out of a
// loop, where it would hold registers.
__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

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
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
  u16 bits = bit_cast<u16>(value);
  asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(float* base, i64 i, float value) {
  u32 bits = bit_cast<u32>(value);
  asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
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
__device__ __forceinline__ float widen(float x) { return x; }

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

__device__ __forceinline__ float cross_entropy_0_1(float input, float largest) {
    return fast_exp(input - largest);                                                 // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
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
constexpr i32 SLOTS = 16;  // groups of lanes that a thread has room for in shared memory, used in turn
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

extern "C" __global__ void __launch_bounds__(512, 1)
fg_cross_entropy_0(const bf16* input_ptr, float* value_4_ptr, float* value_7_ptr) {
    const Index row_count = 8192;
    const Index column_count = 32000;
    const i32 thread = thread_id();
    // This block's share of the rows.
    constexpr i32 PARTS = 132;  // at most: there are no blocks without rows
    const Index part = block_id();
    i32 turn = 0;  // rows alternate between two slots of scratch, so that one barrier a phase is enough
    auto input_staged = shared_array<bf16>(512);
    i32 base = 0;  // the slot of the row's first group
    const auto slot_of = [&](i32 c) { return opaque(base) + c; };  // those of a row lie side by side; no register keeps where
    // Starts the copy of group c of a row; one that does not exist still counts as a group of copies.
    const auto fetch = [&](Index row, i32 c, i32 slot) {
        const Index column = (c * THREADS + thread) * LANES;
        if (row < row_count && column < column_count) {
#pragma unroll
            for (i32 v = 0; v < LANES; v += 8)
                copy_async<8>(input_staged, slot * SLOT + thread * LANES + v, input_ptr, row * 32000 + column + v);
        }
        copy_async_commit();
    };

#pragma unroll
    for (i32 k = 0; k < SLOTS; ++k) fetch(part + k / CHUNKS * PARTS, k % CHUNKS, k);
    for (Index row = part; row < row_count; row += PARTS) {
        copy_async_wait<AHEAD>();

        // Phase 1 of 3: reduces each row to largest.
        bf16 input_raw[CHUNKS][LANES];
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) {
                fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));
                continue;
            }
            shared_load_vec(input_raw[c], input_staged, slot_of(c) * SLOT + thread * LANES);
            fetch(row + (c + SLOTS) / CHUNKS * PARTS, (c + SLOTS) % CHUNKS, slot_of(c));  // the slot is free again
        }
        float largest_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) largest_of[k] = amax_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float input[LANES];
            widen_vec(input_raw[c], input);
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                largest_of[v % SUMS] = amax_f32_combine(largest_of[v % SUMS], input[v]);
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

        // Phase 2 of 3: reduces each row to total; writes value_4.
        float total_of[SUMS];
        for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll
        for (i32 c = 0; c < CHUNKS; ++c) {
            const Index column = (c * THREADS + thread) * LANES;
            if (column >= column_count) continue;
            float input[LANES];
            widen_vec(input_raw[c], input);
            float total_part[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                total_part[v] = cross_entropy_0_1(input[v], largest);
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
        if (thread == 0) {
            float narrowed;
            narrow(largest, narrowed);
            store(value_4_ptr, row, narrowed);
        }

        // Phase 3 of 3: writes value_7.
        if (thread == 0) {
            float narrowed;
            narrow(total, narrowed);
            store(value_7_ptr, row, narrowed);
        }
        turn ^= 1;
        base = base + CHUNKS < SLOTS ? base + CHUNKS : 0;
    }
}
