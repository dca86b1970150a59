// A `sort_key` whose value bits are inverted: the greatest float has the least key; ties stay in the order of indices.
__device__ __forceinline__ i64 descending_key(float x, i64 index) { return sort_key(x, index) ^ ~0xFFFFFFFFLL; }
