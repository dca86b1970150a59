// Barrier of all threads of the block; orders their memory accesses.
__device__ __forceinline__ void block_sync() {
    __syncthreads();
}
