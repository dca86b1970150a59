// cos(x) within 2^-20 for |x| < 2^17.
__device__ __forceinline__ float fast_cos(float x) {
    float result;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(reduced_angle(x)));
    return result;
}
