// merge_heads_val: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid (q_dim0 * q_dim1 * q_dim2 * 128 + 1023) / 1024, block 128.
// Reads q_dim0 * q_dim1 * q_dim2 * 256 bytes, writes q_dim0 * q_dim1 * q_dim2 * 256.
// q: bf16 [q_dim0, q_dim1, q_dim2, 128]; out: bf16 [q_dim0, q_dim2, q_dim1 * 128]; all contiguous, 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/vector_width.cuh"
#include "../primitives/load_vec.16.cuh"
#include "../primitives/load_lanes.cuh"
#include "../primitives/store_vec.16.cuh"
#include "../primitives/store_lanes.cuh"
#include "../primitives/thread_id.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Pipeline
// ---------------------------------------------------------------------------------------------------------------------
using Index = i32;

constexpr i32 LANES = 8;  // vector width
constexpr i32 THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
fg_merge_heads_val(const bf16* q_ptr, bf16* out_ptr, i64 q_dim1_extent, i64 q_dim2_extent, i64 q_dim0_extent) {
    const Index q_dim1 = static_cast<Index>(q_dim1_extent);
    const Index q_dim2 = static_cast<Index>(q_dim2_extent);
    const Index q_dim0 = static_cast<Index>(q_dim0_extent);
    const Index element_count = q_dim0 * q_dim1 * q_dim2 * 128;
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    if (position + LANES <= element_count) {
        const Index i3_outer = position / 128;
        const Index i3 = position - i3_outer * 128;
        const Index i2_outer = i3_outer / q_dim2;
        const Index i2 = i3_outer - i2_outer * q_dim2;
        const Index i0 = i2_outer / q_dim1;
        const Index i1 = i2_outer - i0 * q_dim1;
        bf16 q_raw[LANES];
        load_lanes<LANES>(q_raw, q_ptr, position);
        store_lanes<LANES>(out_ptr, i0 * q_dim1 * q_dim2 * 128 + i1 * 128 + i2 * q_dim1 * 128 + i3, q_raw);
    }
}
