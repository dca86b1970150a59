// Returns the value of lane `lane_id() ^ mask`. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, i32 mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
