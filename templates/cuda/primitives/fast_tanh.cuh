// tanh(x), relative error below 2^-11.
__device__ __forceinline__ float fast_tanh(float x) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
