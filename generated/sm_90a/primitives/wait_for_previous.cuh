// Waits until the previous launch has completed and its writes are visible (griddepcontrol.wait). Returns at once
// unless the launches overlap.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
