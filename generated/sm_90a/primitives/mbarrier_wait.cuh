// Waits for at most a time limit of the hardware; true if the phase of parity `parity` has completed.
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits until the phase of parity `parity` has completed. A new mbarrier is in phase 0, so parity 1 passes at once.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}
