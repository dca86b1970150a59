// rotary_position_ids_0_to_1: 2 kernels in one launch, emitted by fusegen for sm_90a.
// Grid ((q_dim1 + 3) / 4) * q_dim0 * 256 + ((k_dim1 + 3) / 4) * q_dim0 * 256, block 128. The blocks of each part follow
// those of the previous part.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
// rotary_position_ids_0: pointwise, 8 elements per access, 4 accesses per thread along i1.
// Blocks: ((q_dim1 + 3) / 4) * q_dim0 * 256.
// Reads q_dim0 * q_dim1 * 1048576 + q_dim0 * 32768 bytes, writes q_dim0 * q_dim1 * 1048576.
// q, queries: bf16 [q_dim0, q_dim1, 4096, 128]; position_ids: i64 [q_dim0, 4096]; all contiguous, 16-byte aligned.
// rotary_position_ids_1: pointwise, 8 elements per access, 4 accesses per thread along i1.
// Blocks: ((k_dim1 + 3) / 4) * q_dim0 * 256.
// Reads k_dim1 * q_dim0 * 1048576 + q_dim0 * 32768 bytes, writes k_dim1 * q_dim0 * 1048576.
// k, keys: bf16 [q_dim0, k_dim1, 4096, 128]; position_ids: i64 [q_dim0, 4096]; all contiguous, 16-byte aligned.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/narrow.bf16.cuh"
#include "../primitives/narrow_vec.bf16.cuh"
#include "../primitives/power_of.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"
#include "../primitives/widen.i64.bf16.cuh"
#include "../primitives/widen_vec.bf16.cuh"

// rotary_position_ids_1: this text with other arguments.
namespace rotary_position_ids_0 {
// ---------------------------------------------------------------------------------------------------------------------
// Math
// ---------------------------------------------------------------------------------------------------------------------
// _cos_sin in fusegen/specs/rotary.py; its def is line 1:
//   34: exponents = torch.arange(0, channels, 2, dtype=torch.int64, device=q.device).float() / channels
//   35: frequencies, magnitude = 1.0 / base**exponents, 1.0
//   47: angles = positions * frequencies
//   49: return angles.cos() * magnitude, angles.sin() * magnitude
// rotated in fusegen/specs/rotary.py; its def is line 1:
//   28: result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)

__device__ __forceinline__ void rotary_position_ids_0_once(i64 position_ids, i64 coordinate, float& cosine,
        float& sine) {
    const float exponents = static_cast<float>(coordinate * 2LL) / 128.0f;            // _cos_sin, line 34
    // _cos_sin, line 35
    const float quotient = 1.0f / power_of(13.287712f, 2.8238148e-07f /* log2 of 10000 */, exponents);
    const float angles = static_cast<float>(position_ids) * quotient;                 // _cos_sin, line 47
    sincosf(angles, &sine, &cosine);                                                  // _cos_sin, line 49
}

__device__ __forceinline__ void rotary_position_ids_0(float q, float q_other, float cosine, float sine, float& result,
        float& result_2) {
    result = q * cosine + -q_other * sine;                                            // rotated, line 28
    result_2 = q_other * cosine + q * sine;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;
constexpr i32 UNROLL = 2;  // vectors per thread in flight
constexpr i32 REPEATS = 4;  // vectors per thread

__device__ __forceinline__ void run(i32 block, const bf16* q_ptr, const i64* position_ids_ptr, bf16* queries_ptr,
        i64 q_dim1_extent, i64 q_dim0_extent) {
    const Index q_dim1 = static_cast<Index>(q_dim1_extent);
    const Index q_dim0 = static_cast<Index>(q_dim0_extent);
    const Index position = (static_cast<Index>(block) * THREADS + thread_id()) * LANES;
    const Index i3_outer = position / 64;
    const Index i3 = position - i3_outer * 64;
    const Index i2_outer = i3_outer / 4096;
    const Index i2 = i3_outer - i2_outer * 4096;
    const Index i1_chunk = i2_outer / q_dim0;
    const Index i0 = i2_outer - i1_chunk * q_dim0;
    const i64 position_ids_raw = load(position_ids_ptr, i0 * 4096 + i2);
    const i64 position_ids = widen(position_ids_raw);
    float cosine[LANES];
    float sine[LANES];
#pragma unroll
    for (i32 v = 0; v < LANES; ++v) rotary_position_ids_0_once(position_ids, i3 + v, cosine[v], sine[v]);

    const Index first = i1_chunk * REPEATS;
    const Index end = q_dim1 < first + REPEATS ? q_dim1 : first + REPEATS;
#pragma unroll 1
    for (Index start = first; start < end; start += UNROLL) {
        bf16 q_raw[UNROLL][LANES];
        bf16 q_other_raw[UNROLL][LANES];
#pragma unroll
        for (i32 u = 0; u < UNROLL; ++u) {
            const Index i1 = start + u;
            if (i1 >= end) continue;
            const Index at = i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3;
            load_lanes<LANES>(q_raw[u], q_ptr, at);
            load_lanes<LANES>(q_other_raw[u], q_ptr, at + 64);
        }
#pragma unroll
        for (i32 u = 0; u < UNROLL; ++u) {
            const Index i1 = start + u;
            if (i1 >= end) continue;
            const Index at = i2 * 128 + i0 * q_dim1 * 524288 + i1 * 524288 + i3;
            float q[LANES];
            widen_vec(q_raw[u], q);
            float q_other[LANES];
            widen_vec(q_other_raw[u], q_other);
            float result[LANES];
            float result_2[LANES];
#pragma unroll
            for (i32 v = 0; v < LANES; ++v) {
                rotary_position_ids_0(q[v], q_other[v], cosine[v], sine[v], result[v], result_2[v]);
            }
            bf16 result_raw[LANES];
            narrow_vec(result, result_raw);
            store_lanes<LANES>(queries_ptr, at, result_raw);
            bf16 result_2_raw[LANES];
            narrow_vec(result_2, result_2_raw);
            store_lanes<LANES>(queries_ptr, at + 64, result_2_raw);
        }
    }
}
}  // namespace rotary_position_ids_0

// ---------------------------------------------------------------------------------------------------------------------
// Parts
// ---------------------------------------------------------------------------------------------------------------------
constexpr i32 BLOCK = 128;  // threads of each block
constexpr i32 BLOCKS_PER_SM = 1;  // at least, so that a thread may take most registers

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
fg_rotary_position_ids_0_to_1(i64 rotary_position_ids_0_blocks, const bf16* q_ptr, const i64* position_ids_ptr,
        bf16* queries_ptr, const bf16* k_ptr, bf16* keys_ptr, i64 q_dim1, i64 q_dim0, i64 k_dim1) {
    i32 block = block_id();
    if (block < rotary_position_ids_0_blocks) {
        rotary_position_ids_0::run(block, q_ptr, position_ids_ptr, queries_ptr, q_dim1, q_dim0);
        return;
    }
    block -= static_cast<i32>(rotary_position_ids_0_blocks);
    rotary_position_ids_0::run(block, k_ptr, position_ids_ptr, keys_ptr, k_dim1, q_dim0);  // rotary_position_ids_1
}
