// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, f8e4m3& out) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    out.bits = static_cast<u8>(pair);
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
