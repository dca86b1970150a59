// Converts two packed f8e4m3 to floats by instructions; `low` comes from the lower byte.
__device__ __forceinline__ void widen_e4m3x2(u16 pair, float& low, float& high) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<u16>(halves)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<u16>(halves >> 16)));
}
