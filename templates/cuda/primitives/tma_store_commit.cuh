// Commits the TMA stores that this thread issued since the last commit as a group.
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
