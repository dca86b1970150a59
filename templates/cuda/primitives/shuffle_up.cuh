// The value that the lane `distance` before this one passes; the first lanes keep their own. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_up(T value, i32 distance) {
  return __shfl_up_sync(0xffffffffu, value, distance);
}
