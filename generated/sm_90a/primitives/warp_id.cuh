// Index of this thread's warp in its block.
__device__ __forceinline__ i32 warp_id() {
    return static_cast<i32>(threadIdx.x >> 5);
}
