// Storage type to compute type: 16-bit floats to float, integers to i64; float, double and bool stay. Always exact.
//% if "bf16" in widened
__device__ __forceinline__ float widen(bf16 x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}
//% endif
//% if "f16" in widened
__device__ __forceinline__ float widen(f16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}
//% endif
//% if "f8e4m3" in widened
__device__ __forceinline__ float widen(f8e4m3 x) {
//% if converts_float8
    float result, unused;
    widen_e4m3x2(x.bits, result, unused);
    return result;
//% else
    return f8e4m3_to_float(x.bits);
//% endif
}
//% endif
//% if "f8e5m2" in widened
__device__ __forceinline__ float widen(f8e5m2 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(static_cast<u16>(x.bits << 8)));  // the upper byte of an f16
    return result;
}
//% endif
//% if "float" in widened
__device__ __forceinline__ float widen(float x) { return x; }
//% endif
//% if "double" in widened
__device__ __forceinline__ double widen(double x) { return x; }
//% endif
//% if "i8" in widened
__device__ __forceinline__ i64 widen(i8 x) { return x; }
//% endif
//% if "u8" in widened
__device__ __forceinline__ i64 widen(u8 x) { return x; }
//% endif
//% if "i16" in widened
__device__ __forceinline__ i64 widen(i16 x) { return x; }
//% endif
//% if "i32" in widened
__device__ __forceinline__ i64 widen(i32 x) { return x; }
//% endif
//% if "i64" in widened
__device__ __forceinline__ i64 widen(i64 x) { return x; }
//% endif
//% if "bool" in widened
__device__ __forceinline__ bool widen(bool x) { return x; }
//% endif
