// Arrives at an mbarrier, and adds `bytes` of asynchronous copies to those that the current phase expects.
__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
