// a / b within two units in the last place, over the full range.
__device__ __forceinline__ float fast_divide(float a, float b) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
