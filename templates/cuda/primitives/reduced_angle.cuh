// x minus a multiple of 2 pi, between about -pi and pi: sin.approx and cos.approx are accurate only near zero. 2 pi is
// split into two parts, so that the error stays below 2^-22 for |x| < 2^17.
__device__ __forceinline__ float reduced_angle(float x) {
    constexpr float INVERSE_TWO_PI = 0.15915494309189535f, TWO_PI = 6.2831855f, TWO_PI_REST = -1.7484555e-07f;
    const float turns = rintf(x * INVERSE_TWO_PI);
    return fmaf(turns, -TWO_PI_REST, fmaf(turns, -TWO_PI, x));
}
