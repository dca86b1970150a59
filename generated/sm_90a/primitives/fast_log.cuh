// log(x) within 2^-22 for x from 0.5 to 2, 3 units in the last place elsewhere; subnormal x count as zero.
__device__ __forceinline__ float fast_log(float x) {
    constexpr float LN_2 = 0.6931471805599453f;
    return fast_log2(x) * LN_2;
}
