// Says that this thread has come to the cluster's barrier, and goes on; what it did before is done for whoever waits.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
