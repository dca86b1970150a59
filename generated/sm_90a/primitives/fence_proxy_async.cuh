// Orders this thread's writes to shared memory before later reads by the copy engine and by wgmma.
// Every writing thread fences, then a barrier follows, then one thread issues.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
