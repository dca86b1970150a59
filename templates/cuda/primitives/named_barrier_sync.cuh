// Named barrier `id` (1 to 15) of `threads` threads of the block, in whole warps; 0 is the barrier of the block.
__device__ __forceinline__ void named_barrier_sync(i32 id, i32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
