// The value that the lane with index `lane_id() ^ mask` passes. Neighbours take part, WIDTH at a time: a power of two from 2 to 32, which
// `mask` is below; others of the warp may be elsewhere.
template <i32 WIDTH, typename T>
__device__ __forceinline__ T shuffle_xor_among(T value, i32 mask) {
  return __shfl_xor_sync(0xffffffffu >> (32 - WIDTH) << (lane_id() & -WIDTH), value, mask);
}
