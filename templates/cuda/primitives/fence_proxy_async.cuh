// Orders this thread's writes to shared memory before later reads by TMA and wgmma (the async proxy).
// Every writing thread fences; after a barrier, one thread issues.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
