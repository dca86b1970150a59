// Natural logarithm: exponent ln 2 + log(1 + f); the high part of ln 2 has 15 bits, so that its multiple is exact.
FG_INLINE float log_f32(float x) {
    const float ln2_high = 0x1.62e4p-1f;
    const float ln2_low = 0x1.7f7d1cp-20f;
    float exponent;
    const float f = log_reduce(x, exponent);
    const float tail = multiply_add(exponent, ln2_low, log1p_tail(f));
    const float finite = multiply_add(exponent, ln2_high, f + tail);
    const float result = x < __builtin_inff() ? finite : x;
    const float signed_result = x < 0.0f ? __builtin_nanf("") : result;
    return x == 0.0f ? -__builtin_inff() : signed_result;
}
