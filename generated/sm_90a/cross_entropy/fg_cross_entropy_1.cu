// cross_entropy_1: row reduction, 2 phases, rows read again in each phase, emitted by fusegen for sm_90a.
// Grid 1, block 1024, 1024 bytes of shared memory: a row is too long for a block to keep, or may be.
// Reads ((65536 + min(8192, 262144000) * 2) + min(8192, 8192) * 4) + min(8192, 8192) * 4 bytes, writes 2.
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

// Ends the launch: the next synchronisation raises cudaErrorAssert, and the message is printed.
extern "C" __device__ void __assertfail(const char*, const char*, u32, const char*, unsigned long) __attribute__((noreturn));
__device__ __noinline__ void refuse_index(const char* message) { __assertfail(message, "fusegen", 0, "", 1); }

// An index that was read, if it is in [0, extent); else the launch ends with a device assert.
__device__ __forceinline__ i64 checked_index(i64 index, i64 extent, const char* message) {
  if (index < 0 || index >= extent) refuse_index(message);
  return index;
}

// One of two indices.
__device__ __forceinline__ i64 choose(bool first, i64 index, i64 instead) {
  return first ? index : instead;
}

// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
  return static_cast<i32>(threadIdx.x & 31u);
}

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
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
__device__ __forceinline__ float load(const float* base, i64 i) {
  u32 bits;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
  return bit_cast<float>(bits);
}

// Bytes of one memory access to a run of `bytes` bytes: the largest power of two that divides it, at most 16.
// It is also the alignment that load_vec and store_vec ask for.
__device__ __forceinline__ constexpr i32 vector_width(i32 bytes) {
  return bytes % 16 == 0 ? 16 : bytes & -bytes;
}

// N consecutive elements from global memory, in accesses of vector_width(N * sizeof(T)) bytes, to which they are aligned.
template <int N, typename T>
__device__ __forceinline__ void load_vec(T (&dst)[N], const T* base, i64 i) {
  constexpr i32 bytes = N * sizeof(T);
  constexpr i32 width = vector_width(bytes);
  static_assert(width == 4 || width == 8 || width == 16, "no other accesses were expected");
  if constexpr (width == 4) {
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; ++w) asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[w]) : "l"(from + w));
    memcpy(dst, words, bytes);
  }
  if constexpr (width == 8) {
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 2)
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[w]), "=r"(words[w + 1]) : "l"(from + w));
    memcpy(dst, words, bytes);
  }
  if constexpr (width == 16) {
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4)
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3]) : "l"(from + w));
    memcpy(dst, words, bytes);
  }
}

// N consecutive elements of which only every W-th is known to start an aligned access.
template <int W, int N, typename T>
__device__ __forceinline__ void load_lanes(T (&dst)[N], const T* base, i64 i) {
  if constexpr (W == N) {
    load_vec(dst, base, i);
  } else {
#pragma unroll
    for (i32 k = 0; k < N; k += W) {
      T part[W];
      load_vec(part, base, i + k);
#pragma unroll
      for (i32 j = 0; j < W; ++j) dst[k + j] = part[j];
    }
  }
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
__device__ __forceinline__ float load_once(const float* base, i64 i) {
  u32 bits;
  asm("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
  return bit_cast<float>(bits);
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
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
__device__ __forceinline__ void store(float* base, i64 i, float value) {
  u32 bits = bit_cast<u32>(value);
  asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
}

// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
  return static_cast<i32>(threadIdx.x);
}

// Waits until the launch before this one has completed and all that it wrote can be seen. Where the launch does not overlap with that,
// it returns at once.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
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
__device__ __forceinline__ float sum_f32_identity() {
    return 0.0f;
}

__device__ __forceinline__ float sum_f32_combine(float a, float b) {
    return a + b;
}

__device__ __forceinline__ void cross_entropy_1_0(i64 ignore_index, i64 target, float input, float value_4, float value_7, float& total_part, float& total_2_part) {
    const bool ne_1 = target != ignore_index;                                         // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
    total_part = ne_1 ? -(input - value_4 - logf(value_7)) : 0.0f;
    total_2_part = ne_1 ? 1.0f : 0.0f;
}

__device__ __forceinline__ float cross_entropy_1_row_1(float total, float total_2) {
    return fast_divide(total, total_2);                                               // line 13: loss = F.cross_entropy(logits, target, weight, ignore_index=ignore_inde…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 1024;  // that share a row
constexpr i32 MEETING = 32;  // lanes that take a warp's part each: a power of two
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before

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

extern "C" __global__ void __launch_bounds__(1024, 1)
fg_cross_entropy_1(const i64* target_ptr, const bf16* input_ptr, const float* value_4_ptr, const float* value_7_ptr, bf16* out_ptr, i64 ignore_index) {
    wait_for_previous();
    const Index column_count = 8192;
    const i32 thread = thread_id();
    const Index row = static_cast<Index>(block_id());

    // Phase 1 of 2: reduces each row to total, total_2.
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
    float total_2_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_2_of[k] = sum_f32_identity();
#pragma unroll 4
    for (Index column = thread * LANES; column < column_count; column += THREADS * LANES) {
        i64 target_raw[LANES];
        load_lanes<2>(target_raw, target_ptr, column);
        bf16 input_raw[LANES];
        for (i32 v = 0; v < 8; ++v) input_raw[v] = load(input_ptr, column * 32000 + v * 32000 + checked_index(choose(widen(load_once(target_ptr, column + v)) != ignore_index, widen(load_once(target_ptr, column + v)), 0), 32000, "fusegen: cross_entropy_1: index of a computed tensor out of range [0, 32000)"));
        float value_4_raw[LANES];
        load_lanes<4>(value_4_raw, value_4_ptr, column);
        float value_7_raw[LANES];
        load_lanes<4>(value_7_raw, value_7_ptr, column);
        i64 target[LANES];
        widen_vec(target_raw, target);
        float input[LANES];
        widen_vec(input_raw, input);
        float value_4[LANES];
        widen_vec(value_4_raw, value_4);
        float value_7[LANES];
        widen_vec(value_7_raw, value_7);
        float total_part[LANES];
        float total_2_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            cross_entropy_1_0(ignore_index, target[v], input[v], value_4[v], value_7[v], total_part[v], total_2_part[v]);
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
            total_2_of[v % SUMS] = sum_f32_combine(total_2_of[v % SUMS], total_2_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
    }
    float total = total_of[0];
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_2_of[k] = sum_f32_combine(total_2_of[k], total_2_of[k + half]);
    }
    float total_2 = total_2_of[0];
    row_sum_f32_leave(total, shared_array<float>(0));
    row_sum_f32_leave(total_2, shared_array<float>(512));
    block_sync();
    total = row_sum_f32_meet(shared_array<float>(0));
    total_2 = row_sum_f32_meet(shared_array<float>(512));

    // Phase 2 of 2: computes row_value; writes out.
    const float row_value = cross_entropy_1_row_1(total, total_2);
    if (thread == 0) {
        bf16 narrowed;
        narrow(row_value, narrowed);
        store(out_ptr, 0, narrowed);
    }
}
