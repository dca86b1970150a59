// base^x = 2^(x * (high + low)) for a positive base, given its binary logarithm as the float next to it and the float
// next to the rest: within 3 units in the last place.
__device__ __forceinline__ float power_of(float high, float low, float x) {
    constexpr float LN_2 = 0.69314718f;
    const float exponent = x * high;
    const float rest = fmaf(x, high, -exponent) + x * low;
    const float correction = fabsf(exponent) < 200.0f ? 1.0f + rest * LN_2 : 1.0f;  // beyond, 0 or infinity
    return exp2f(exponent) * correction;
}
