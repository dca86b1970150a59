// Returns the value of lane `source`. All 32 lanes take part.
template <typename T>
__device__ __forceinline__ T shuffle(T value, i32 source) {
    return __shfl_sync(0xffffffffu, value, source);
}
