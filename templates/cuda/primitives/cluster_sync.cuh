// Barrier of all threads of the cluster; orders their accesses to each other's shared memory.
// A block must not exit while others read its shared memory, so a cluster_sync follows the last cluster_load.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
