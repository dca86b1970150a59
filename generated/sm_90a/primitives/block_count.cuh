// Number of blocks in the grid.
__device__ __forceinline__ i32 block_count() {
    return static_cast<i32>(gridDim.x);
}
