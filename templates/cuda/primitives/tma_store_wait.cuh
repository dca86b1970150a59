// Waits until at most PENDING of this thread's groups of TMA stores still read shared memory, which may then be reused.
template <i32 PENDING>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
