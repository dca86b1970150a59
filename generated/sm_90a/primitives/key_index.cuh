// The index of a `sort_key` or `descending_key`.
__device__ __forceinline__ i64 key_index(i64 key) { return (key & 0xFFFFFFFFLL) >> 1; }
