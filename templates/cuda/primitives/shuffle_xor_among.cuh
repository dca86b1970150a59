// Returns the value of lane `lane_id() ^ mask`. Only the aligned group of WIDTH lanes takes part: a power of two from 2
// to 32, above `mask`; other lanes of the warp may have diverged.
template <i32 WIDTH, typename T>
__device__ __forceinline__ T shuffle_xor_among(T value, i32 mask) {
    return __shfl_xor_sync(0xffffffffu >> (32 - WIDTH) << (lane_id() & -WIDTH), value, mask);
}
