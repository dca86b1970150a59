// Adds 1 to a counter, from `last` to zero. What the block has written before its last barrier becomes visible to the
// blocks that wait for the counter.
__device__ __forceinline__ void counter_advance(u32* counter, u32 last) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" :: "l"(counter), "r"(last) : "memory");
}
