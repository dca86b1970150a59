// Arrives once at the mbarrier at the same address in the shared memory of block `rank` of the cluster. It orders what the copy engine
// and the tensor cores have read, which is done when they are waited for; a release for the cluster would wait for all memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(u64* barrier, i32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
