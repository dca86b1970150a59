// 2^x: n = round(x), then e^((x - n) ln 2).
FG_INLINE float exp2_f32(float x) {
    const float low = -151.0f;
    const float high = 129.0f;
    const float ln2 = 0x1.62e43p-1f;
    const float bounded = x < low ? low : (x > high ? high : x);
    i32 n;
    const float k = nearest_integer(bounded, 1.0f, n);
    return scale_by_power(1.0f + expm1_reduced((bounded - k) * ln2), n);
}
