// Makes initialized mbarriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
