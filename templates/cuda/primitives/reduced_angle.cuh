// x minus a multiple of 2 pi, between about -pi and pi: sin.approx and cos.approx are accurate only near zero. 2 pi is
// split into two parts, so that the error stays below 2^-22 for |x| < 2^17.
__device__ __forceinline__ float reduced_angle(float x) {
    const float turns = rintf(x * 0.15915494309189535f);
    return fmaf(turns, 1.7484555e-07f, fmaf(turns, -6.2831855f, x));
}
