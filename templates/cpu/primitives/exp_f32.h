// e^x: 2^n (1 + expm1(r)). Beyond the bounds the result is 0 or infinity, selected at the end, so that nothing waits for the
// comparisons; NaN passes through.
FG_INLINE float exp_f32(float x) {
    const float low = -104.0f;
    const float high = 89.0f;
    i32 n;
    const float r = exp_reduce(x, n);
    const float value = scale_by_power(1.0f + expm1_reduced(r), n);
    return x < low ? 0.0f : (x > high ? __builtin_inff() : value);
}
