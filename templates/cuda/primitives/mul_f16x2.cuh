// Multiplies pairs of f16.
__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
