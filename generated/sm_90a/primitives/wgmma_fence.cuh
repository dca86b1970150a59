// Orders register accesses before the wgmma that follow; needed before the first one and after any change of registers.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
