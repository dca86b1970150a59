// x 2^n for |n| <= 252 in two steps, so that the result may overflow or be subnormal.
FG_INLINE float scale_by_power(float x, i32 n) {
    const i32 half = n >> 1;
    return x * power_of_two(half) * power_of_two(n - half);
}
