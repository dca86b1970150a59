// Barrier in shared memory whose phase completes after `arrivals` arrivals and all bytes that were announced to it.
// One thread initialises; `mbarrier_init_fence` and a block (or cluster) barrier come before the first use.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
