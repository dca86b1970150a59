// 1 / x within one unit in the last place, for x >= 1; subnormal results become zero.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
