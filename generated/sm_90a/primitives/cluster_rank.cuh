// Index of this block in its cluster.
__device__ __forceinline__ i32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<i32>(rank);
}
