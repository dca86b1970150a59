// base^exponent of integers, wrapping, as torch.pow: a negative exponent gives 0 unless the base is 1 or -1.
__device__ __forceinline__ i64 integer_power(i64 base, i64 exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 == 0 ? 1 : -1) : 0;
    u64 result = 1, factor = static_cast<u64>(base);
    for (u64 left = static_cast<u64>(exponent); left != 0; left >>= 1, factor *= factor) {
        if (left & 1) result *= factor;
    }
    return static_cast<i64>(result);
}
