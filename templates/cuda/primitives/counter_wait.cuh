// Waits until a counter has reached `count`. After the next barrier, the block sees what was written before.
__device__ __forceinline__ void counter_wait(const u32* counter, u32 count) {
    u32 value;
    while (true) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if (value >= count) break;
        asm volatile("nanosleep.u32 64;");  // polls of many blocks would delay the counting
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
