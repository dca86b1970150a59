// Arrives at the cluster barrier without waiting; earlier accesses of this thread are visible to threads that wait
// (release).
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
