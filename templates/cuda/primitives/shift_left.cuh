// a << count, as torch: wraps to 64 bits; a negative or too large count gives 0.
__device__ __forceinline__ i64 shift_left(i64 a, i64 count) {
    return static_cast<u64>(count) < 64 ? static_cast<i64>(static_cast<u64>(a) << count) : 0;
}
