// Subtracts pairs of bf16, as a + b * -1: the fused instruction exists on all GPUs with bf16.
__device__ __forceinline__ u32 sub_bf16x2(u32 a, u32 b) {
    u32 difference;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return difference;
}
