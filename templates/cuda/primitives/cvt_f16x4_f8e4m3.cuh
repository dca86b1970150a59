// Converts four packed f8e4m3 to two words of packed f16, exactly.
__device__ __forceinline__ void cvt_f16x4_f8e4m3(u32 (&halves)[2], u32 word) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(halves[0]), "=r"(halves[1])
        : "r"(word));
}
