// As wrapped_index, in kernels with wgmma.
__device__ __forceinline__ i64 wrapped_index_by_trap(i64 index, i64 extent, const char* message) {
    return checked_index_by_trap(index < 0 ? index + extent : index, extent, message);
}
