// log(1 + x): the exponent k comes from the rounded 1 + x, the reduced f = 2^-k x + (2^-k - 1) from x itself, rounded once.
FG_INLINE float log1p_f32(float x) {
    const float ln2_high = 0x1.62e4p-1f;
    const float ln2_low = 0x1.7f7d1cp-20f;
    const float linear = 0x1p-25f;
    const u32 sqrt_half = 0x3f3504f3u;
    const i32 k = (i32)(float_bits(1.0f + x) - sqrt_half) >> 23;
    // quarters: 2^(2-k) is normal up to k = 128
    const float scale = power_of_two(2 - k);
    const float f = multiply_add(0.25f * x, scale, multiply_add(0.25f, scale, -1.0f));
    const float exponent = (float)k;
    const float tail = multiply_add(exponent, ln2_low, log1p_tail(f));
    const float finite = multiply_add(exponent, ln2_high, f + tail);
    const float result = x < __builtin_inff() ? finite : x;
    const float signed_result = x < -1.0f ? __builtin_nanf("") : result;
    const float full = x == -1.0f ? -__builtin_inff() : signed_result;
    return __builtin_fabsf(x) < linear ? x : full;
}
