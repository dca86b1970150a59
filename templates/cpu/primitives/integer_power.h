// base^exponent of integers, wrapping, as torch.pow: a negative exponent gives 0 unless the base is 1 or -1.
FG_INLINE i64 integer_power(i64 base, i64 exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 == 0 ? 1 : -1) : 0;
    u64 result = 1;
    u64 factor = (u64)base;
    for (u64 left = (u64)exponent; left != 0; left >>= 1) {
        if (left & 1u) result *= factor;
        factor *= factor;
    }
    return (i64)result;
}
