// Subtracts pairs of f16.
__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}
