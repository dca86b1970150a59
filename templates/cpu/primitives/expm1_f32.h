// e^x - 1 = 2^n expm1(r) + (2^n - 1), computed at half its size so that n = 128 does not overflow early.
FG_INLINE float expm1_f32(float x) {
    const float low = -18.0f;
    const float high = 89.0f;
    const float linear = 0x1p-26f;
    i32 n;
    const float r = exp_reduce(x, n);
    const float half_power = power_of_two(n - 1);
    const float value = 2.0f * multiply_add(half_power, expm1_reduced(r), half_power - 0.5f);
    const float result = x < low ? -1.0f : (x > high ? __builtin_inff() : value);
    return __builtin_fabsf(x) < linear ? x : result;
}
