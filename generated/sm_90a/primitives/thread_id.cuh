// Index of this thread in its block.
__device__ __forceinline__ i32 thread_id() {
    return static_cast<i32>(threadIdx.x);
}
