// Arrives at a barrier and announces `bytes` that the copy engine will deliver within the current phase.
__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
