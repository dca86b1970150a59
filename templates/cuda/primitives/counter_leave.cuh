// Adds 1 to a counter that the thread's warp has waited for, from `last` to zero. It orders no other accesses.
__device__ __forceinline__ void counter_leave(u32* counter, u32 last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" :: "l"(counter), "r"(last) : "memory");
}
