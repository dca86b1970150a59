// Waits until the launch before this one has completed and all that it wrote can be seen. Where the launch does not overlap with that,
// it returns at once.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
