// Waits until at most PENDING groups of wgmma are in flight. The accumulator is an operand, so that the compiler
// does not read it before the wait.
template <i32 PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <i32 PENDING, i32 REGISTERS>
__device__ __forceinline__ void wgmma_wait(float (&accumulator)[REGISTERS]) {
    wgmma_wait<PENDING>();
#pragma unroll
    for (i32 i = 0; i < REGISTERS; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}
