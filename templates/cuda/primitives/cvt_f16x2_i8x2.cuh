// Converts two packed i8 to packed f16, exactly: a byte plus 128 is the end of the bits of 1024 + byte + 128.
__device__ __forceinline__ u32 cvt_f16x2_i8x2(u16 pair) {
    u32 halves;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(permute_bytes(pair ^ 0x8080u, 0x4140) | 0x64006400u), "r"(0x64806480u));
    return halves;
}
