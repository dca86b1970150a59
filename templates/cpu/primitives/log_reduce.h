// x = 2^exponent (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2), for positive finite x; returns f.
FG_INLINE float log_reduce(float x, float& exponent) {
    const u32 sqrt_half = 0x3f3504f3u;
    const bool subnormal = x < 0x1p-126f;
    const u32 bits = float_bits(subnormal ? x * 0x1p23f : x) - sqrt_half;
    exponent = (float)((i32)bits >> 23) - (subnormal ? 23.0f : 0.0f);
    return float_from_bits((bits & 0x007fffffu) + sqrt_half) - 1.0f;
}
