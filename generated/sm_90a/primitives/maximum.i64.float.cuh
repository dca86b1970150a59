// The larger of two values; NaN if either is NaN.
__device__ __forceinline__ float maximum(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ i64 maximum(i64 a, i64 b) {
    return a > b ? a : b;
}
