// The float of a `descending_key`.
__device__ __forceinline__ float descending_value(i64 key) { return sorted_value(key ^ ~0xFFFFFFFFLL); }
