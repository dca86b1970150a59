// sin(x) within 2^-20 for |x| < 2^17; subnormal results become zero.
__device__ __forceinline__ float fast_sin(float x) {
    float result;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(reduced_angle(x)));
    return result;
}
