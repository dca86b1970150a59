// As checked_index; a negative index counts from the end.
__device__ __forceinline__ i64 wrapped_index(i64 index, i64 extent, const char* message) {
    return checked_index(index < 0 ? index + extent : index, extent, message);
}
