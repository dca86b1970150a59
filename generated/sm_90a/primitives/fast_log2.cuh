// log2(x) within 2^-22 for x from 0.5 to 2, relative elsewhere; subnormal x count as zero.
__device__ __forceinline__ float fast_log2(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
