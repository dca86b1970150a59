// distillation_loss_1: row reduction, 2 phases, rows read again in each phase by 16 blocks, emitted by fusegen for sm_90a.
// Grid 1 * 16, block 1024, 4104 bytes of shared memory: a row is too long for 16 blocks to keep, or may be.
// Reads student_dim0 * 128016 bytes, writes 4.
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

// Says that this thread has come to the cluster's barrier, and goes on; what it did before is done for whoever waits.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Same bits, another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Shared-memory address: the 32-bit form of a pointer to shared memory that PTX operands expect.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Sends a value to the shared memory of block `rank` of the cluster, as element i of the array at the same place there. Nobody waits
// for it here: it counts its bytes at the barrier at the same place there, where `mbarrier_wait_cluster` waits for them.
template <typename T>
__device__ __forceinline__ void cluster_push(T* array, i32 i, T value, i32 rank, u64* barrier) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "cluster_push sends 4 or 8 bytes");
  u32 there, barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(array + i)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 :: "r"(there), "l"(bit_cast<u64>(value)), "r"(barrier_there) : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(there), "r"(bit_cast<u32>(value)), "r"(barrier_there) : "memory");
  }
}

// Index of this block in its cluster.
__device__ __forceinline__ i32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<i32>(rank);
}

// Waits until all threads of the cluster have come to its barrier, at which this one has arrived.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
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
  static_assert(width == 16, "no other accesses were expected");
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

// Arrives at a barrier and announces `bytes` that the copy engine will deliver within the current phase.
__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Barrier in shared memory whose phase completes after `arrivals` arrivals and all bytes that were announced to it.
// One thread initialises; `mbarrier_init_fence` and a block (or cluster) barrier come before the first use.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes freshly initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits until the phase of parity `parity` has completed, and sees what other blocks of the cluster have sent within it.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  u32 done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

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

__device__ __forceinline__ float distillation_loss_1_0(float temperature, float teacher, float value_11, float value_14, float student, float value_4, float value_7) {
    const float sub_1 = fast_divide(teacher, temperature) - value_11 - logf(value_14);  // line 11: log_p, log_q = F.log_softmax(student / temperature, -1), F.log_softmax(…
    return fast_exp(sub_1) * (sub_1 - (fast_divide(student, temperature) - value_4 - logf(value_7)));  // line 13: return F.kl_div(approximation, wanted, log_target=True, reduction="batc…
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // neighbours that one access moves
constexpr i32 THREADS = 16384;  // that share a row
constexpr i32 CLUSTER = 16;  // blocks that they belong to
constexpr i32 BLOCK = THREADS / CLUSTER;
constexpr i32 WARPS = 512;
constexpr i32 SUMS = 4;  // that a thread has under way of what it reduces: an addition need not wait for the one before

// Index of this warp among those of the row.
__device__ __forceinline__ i32 warp_of_row() {
    return cluster_rank() * (WARPS / CLUSTER) + warp_id();
}

// Combines one value of every thread of a row; all of them receive the result.
// Each warp sends its part to all blocks of the cluster, and waits until `arrived` has counted those of all warps.
template <typename Scratch>
__device__ __forceinline__ float row_sum_f32(float value, Scratch scratch, u64* arrived) {
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    if (lane_id() < CLUSTER) cluster_push(scratch, warp_of_row(), value, lane_id(), arrived);
    mbarrier_wait_cluster(arrived, 0);
    value = sum_f32_identity();
#pragma unroll
    for (i32 warp = lane_id(); warp < WARPS; warp += 32) value = sum_f32_combine(value, shared_load(scratch, warp));
#pragma unroll
    for (i32 mask = 16; mask > 0; mask /= 2) value = sum_f32_combine(value, shuffle_xor(value, mask));
    return value;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(1024, 1)
fg_distillation_loss_1(const bf16* teacher_ptr, const float* value_11_ptr, const float* value_14_ptr, const bf16* student_ptr, const float* value_4_ptr, const float* value_7_ptr, float* value_20_ptr, i64 student_dim0, double temperature) {
    wait_for_previous();
    const Index column_count = student_dim0 * 32000;
    const i32 thread = cluster_rank() * BLOCK + thread_id();  // among those of the row
    u64* const arrived = &*shared_array<u64>(4096);  // a barrier for each reduction, of the bytes that warps send
    if (thread_id() == 0) {
        mbarrier_init(arrived + 0, 1);
        mbarrier_init_fence();
        mbarrier_expect(arrived + 0, WARPS * sizeof(float));
    }
    cluster_arrive();
    const Index row = static_cast<Index>(block_id() / CLUSTER);

    // Phase 1 of 2: reduces each row to total.
    float total_of[SUMS];
    for (i32 k = 0; k < SUMS; ++k) total_of[k] = sum_f32_identity();
#pragma unroll 4
    for (Index column = thread * LANES; column < column_count; column += THREADS * LANES) {
        const Index i0 = column / 32000;
        const Index i1 = column - i0 * 32000;
        bf16 teacher_raw[LANES];
        load_lanes<8>(teacher_raw, teacher_ptr, i0 * 32000 + i1);
        float value_11_raw[LANES];
        for (i32 v = 0; v < 8; ++v) value_11_raw[v] = load(value_11_ptr, i0);
        float value_14_raw[LANES];
        for (i32 v = 0; v < 8; ++v) value_14_raw[v] = load(value_14_ptr, i0);
        bf16 student_raw[LANES];
        load_lanes<8>(student_raw, student_ptr, i0 * 32000 + i1);
        float value_4_raw[LANES];
        for (i32 v = 0; v < 8; ++v) value_4_raw[v] = load(value_4_ptr, i0);
        float value_7_raw[LANES];
        for (i32 v = 0; v < 8; ++v) value_7_raw[v] = load(value_7_ptr, i0);
        float teacher[LANES];
        widen_vec(teacher_raw, teacher);
        float value_11[LANES];
        widen_vec(value_11_raw, value_11);
        float value_14[LANES];
        widen_vec(value_14_raw, value_14);
        float student[LANES];
        widen_vec(student_raw, student);
        float value_4[LANES];
        widen_vec(value_4_raw, value_4);
        float value_7[LANES];
        widen_vec(value_7_raw, value_7);
        float total_part[LANES];
#pragma unroll
        for (i32 v = 0; v < LANES; ++v) {
            total_part[v] = distillation_loss_1_0(temperature, teacher[v], value_11[v], value_14[v], student[v], value_4[v], value_7[v]);
            total_of[v % SUMS] = sum_f32_combine(total_of[v % SUMS], total_part[v]);
        }
    }
#pragma unroll
    for (i32 half = SUMS / 2; half > 0; half /= 2) {
#pragma unroll
        for (i32 k = 0; k < half; ++k) total_of[k] = sum_f32_combine(total_of[k], total_of[k + half]);
    }
    float total = total_of[0];
    cluster_wait();  // the other blocks have begun, and their barriers are there
    total = row_sum_f32(total, shared_array<float>(0), arrived + 0);

    // Phase 2 of 2: writes value_20.
    if (thread == 0) {
        float narrowed;
        narrow(total, narrowed);
        store(value_20_ptr, 0, narrowed);
    }
}
