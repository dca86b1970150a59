// Index of this block in the grid.
__device__ __forceinline__ i32 block_id() {
    return static_cast<i32>(blockIdx.x);
}
