// Index of this thread in its warp.
__device__ __forceinline__ i32 lane_id() {
    return static_cast<i32>(threadIdx.x & 31u);
}
