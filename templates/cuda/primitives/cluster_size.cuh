// Number of blocks in this cluster.
__device__ __forceinline__ i32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<i32>(size);
}
