// x = n ln(2) + r with |r| <= ln(2)/2 (Cody and Waite: the high part of ln 2 has 15 bits, so that n times it is exact).
FG_INLINE float exp_reduce(float x, i32& n) {
    const float log2_e = 0x1.715476p+0f;
    const float ln2_high = 0x1.62e4p-1f;
    const float ln2_low = 0x1.7f7d1cp-20f;
    const float k = nearest_integer(x, log2_e, n);
    return multiply_add(-k, ln2_low, multiply_add(-k, ln2_high, x));
}
