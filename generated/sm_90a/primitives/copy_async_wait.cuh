// Waits until at most PENDING of this thread's groups of copies are under way; it may then read what the others brought.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
