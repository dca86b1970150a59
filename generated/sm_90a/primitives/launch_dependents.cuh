// Lets blocks of the next launch start once all blocks of this one have called it or ended
// (griddepcontrol.launch_dependents).
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;");
}
