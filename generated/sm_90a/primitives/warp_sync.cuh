// Barrier of all threads of the warp; orders their memory accesses (a shuffle does not).
__device__ __forceinline__ void warp_sync() {
    __syncwarp();
}
