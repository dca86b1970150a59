// Closes a group of this thread's asynchronous copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
