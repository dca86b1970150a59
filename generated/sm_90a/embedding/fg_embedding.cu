// embedding: pointwise, 8 elements per access, emitted by fusegen for sm_90a.
// Grid input_dim0 * 16384, block 128.
// Reads input_dim0 * 32768 + min(input_dim0 * 16777216, weight_dim0 * 4096) * 2 bytes, writes input_dim0 * 33554432.
// weight: bf16 [weight_dim0, 4096]; input: i64 [input_dim0, 4096]; out: bf16 [input_dim0, 4096, 4096]; all contiguous,
// 16-byte aligned.
// Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant.
#include "../primitives/types.cuh"
#include "../primitives/block_id.cuh"
#include "../primitives/refuse_index.cuh"
#include "../primitives/checked_index.cuh"
#include "../primitives/bit_cast.cuh"
#include "../primitives/load.i64.cuh"
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
fg_embedding(const bf16* weight_ptr, const i64* input_ptr, bf16* out_ptr, i64 weight_dim0_extent) {
    const Index weight_dim0 = static_cast<Index>(weight_dim0_extent);
    const Index position = (static_cast<Index>(block_id()) * THREADS + thread_id()) * LANES;

    const Index i0 = position / 4096;
    const Index i1 = position - i0 * 4096;
    const Index weight_at = checked_index(load(input_ptr, i0), weight_dim0,
            "fusegen: embedding: index of 'weight' out of range [0, weight_dim0)");
    bf16 weight_raw[LANES];
    load_lanes<LANES>(weight_raw, weight_ptr, weight_at * 4096 + i1);
    store_lanes<LANES>(out_ptr, position, weight_raw);
}
