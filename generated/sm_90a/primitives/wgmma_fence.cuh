// Orders accesses to registers before later wgmma; required before the first wgmma and after any write to its
// registers.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
