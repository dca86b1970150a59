// Converts four packed i8 to two words of packed f16, exactly: a byte plus 128 ends the bits of 1024 + 128 + the byte.
__device__ __forceinline__ void cvt_f16x4_i8(u32 (&halves)[2], u32 word) {
    const u32 added = word ^ 0x80808080u;
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(halves[0])
        : "r"(permute_bytes(added, 0x64646464u, 0x4140)), "r"(0x64806480u));
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(halves[1])
        : "r"(permute_bytes(added, 0x64646464u, 0x4342)), "r"(0x64806480u));
}
