// Commits the wgmma that this warpgroup issued since the last commit as a group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
