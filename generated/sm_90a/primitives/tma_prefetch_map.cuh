// Fetches a tensor map into the descriptor cache, so that the first copy does not wait for it.
__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
