// Waits until all threads of the cluster have come to its barrier, at which this one has arrived.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
