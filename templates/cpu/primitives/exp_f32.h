// e^x: 2^n (1 + expm1(r)). Beyond the bounds the result is 0 or infinity; the comparisons let NaN through.
FG_INLINE float exp_f32(float x) {
    const float low = -104.0f;
    const float high = 89.0f;
    const float bounded = x < low ? low : (x > high ? high : x);
    i32 n;
    const float r = exp_reduce(bounded, n);
    return scale_by_power(1.0f + expm1_reduced(r), n);
}
