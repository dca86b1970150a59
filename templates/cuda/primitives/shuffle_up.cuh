// Returns the value of the lane `distance` before this one; the first lanes keep their own. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_up(T value, i32 distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
