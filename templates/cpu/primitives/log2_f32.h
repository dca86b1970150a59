// Binary logarithm: exponent + log(1 + f) / ln 2, with 1 / ln 2 in two parts (the first has 12 bits).
FG_INLINE float log2_f32(float x) {
    const float inverse_ln2 = 0x1.715476p+0f;
    const float inverse_ln2_high = 0x1.714p+0f;
    const float inverse_ln2_low = 0x1.47652cp-12f;
    float exponent;
    const float f = log_reduce(x, exponent);
    const float rest = multiply_add(f, inverse_ln2_low, log1p_tail(f) * inverse_ln2);
    const float finite = exponent + multiply_add(f, inverse_ln2_high, rest);
    const float result = x < __builtin_inff() ? finite : x;
    const float signed_result = x < 0.0f ? __builtin_nanf("") : result;
    return x == 0.0f ? -__builtin_inff() : signed_result;
}
