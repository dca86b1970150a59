// Barrier among `threads` threads of the block (whole warps) under the number `id`, 1 to 15; 0 is the block's own.
__device__ __forceinline__ void named_barrier_sync(i32 id, i32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
