// a >> count, as torch: an arithmetic shift; a negative or too large count gives 0 or -1, by the sign.
__device__ __forceinline__ i64 shift_right(i64 a, i64 count) {
    return a >> (static_cast<u64>(count) < 63 ? count : 63);
}
