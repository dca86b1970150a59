// Waits until all threads have arrived at the cluster barrier; follows `cluster_arrive`.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
