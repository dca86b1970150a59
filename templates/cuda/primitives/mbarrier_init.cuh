// Initializes an mbarrier in shared memory: a phase completes after `arrivals` arrivals and all expected bytes.
// One thread does so; `mbarrier_init_fence` and a block or cluster barrier precede the first use.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
