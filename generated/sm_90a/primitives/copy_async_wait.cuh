// Waits until at most PENDING of this thread's cp.async groups are in flight; it may then read the data of the others.
template <i32 PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
