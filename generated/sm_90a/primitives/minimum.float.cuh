// The smaller of two values; NaN if either is NaN.
__device__ __forceinline__ float minimum(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
