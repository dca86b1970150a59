// Multiplies pairs of bf16. The fused instruction exists on all GPUs with bf16; adding -0 keeps each product.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}
