// Converts two packed f8e4m3 to packed f16, exactly.
__device__ __forceinline__ u32 cvt_f16x2_f8e4m3x2(u16 pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
