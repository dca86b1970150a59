// Returns `x & mask | bits`, in one instruction; without it, the compiler uses two for two constants.
__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 result;
    // 0xea is the truth table of a & b | c.
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}
