// Converts four packed i8 to two words of packed f16, exactly: a byte plus 128 ends the bits of 1024 + 128 + the byte.
__device__ __forceinline__ void cvt_f16x4_i8(u32 (&halves)[2], u32 word) {
    constexpr u32 F16_1024 = 0x64646464u, F16_1152 = 0x64806480u;  // the upper bytes of 1024; two of 1152
    const u32 added = word ^ 0x80808080u;
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(halves[0])
        : "r"(permute_bytes(added, F16_1024, 0x4140)), "r"(F16_1152));
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(halves[1])
        : "r"(permute_bytes(added, F16_1024, 0x4342)), "r"(F16_1152));
}
