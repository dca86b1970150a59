// Commits this thread's pending cp.async as a group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
