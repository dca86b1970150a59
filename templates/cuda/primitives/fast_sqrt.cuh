// sqrt(x), relative error below 2^-23; subnormal x count as zero.
__device__ __forceinline__ float fast_sqrt(float x) {
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
