// As checked_index, in kernels with wgmma.
__device__ __forceinline__ i64 checked_index_by_trap(i64 index, i64 extent, const char* message) {
    if (index < 0 || index >= extent) trap_index(message);
    return index;
}
