// Waits until the phase of parity `parity` has completed; the data that other blocks of the cluster sent in it is then
// visible.
__device__ __forceinline__ void mbarrier_wait_cluster(u64* barrier, u32 parity) {
    u32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n\t"
            ".reg .pred p;\n\t"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}
