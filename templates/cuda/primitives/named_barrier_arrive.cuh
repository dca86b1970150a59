// Arrives at a named barrier without waiting; `threads` counts both those that arrive and those that wait.
__device__ __forceinline__ void named_barrier_arrive(i32 id, i32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
