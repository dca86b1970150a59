// Selects one of two indices.
__device__ __forceinline__ i64 choose(bool first, i64 index, i64 instead) {
    return first ? index : instead;
}
