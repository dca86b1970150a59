// Returns an index that was loaded; outside of [0, extent), the launch ends with a device assert.
__device__ __forceinline__ i64 checked_index(i64 index, i64 extent, const char* message) {
    if (index < 0 || index >= extent) refuse_index(message);
    return index;
}
