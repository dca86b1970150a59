// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
//% if "bf16" in narrowed
__device__ __forceinline__ void narrow(float value, bf16& out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
//% endif
//% if "f16" in narrowed
__device__ __forceinline__ void narrow(float value, f16& out) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
//% endif
//% if "f8e4m3" in narrowed
__device__ __forceinline__ void narrow(float value, f8e4m3& out) {
//% if converts_float8
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    out.bits = static_cast<u8>(pair);
//% else
    out.bits = float_to_f8e4m3(value);
//% endif
}
//% endif
//% if "f8e5m2" in narrowed
__device__ __forceinline__ void narrow(float value, f8e5m2& out) {
//% if converts_float8
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    // The instruction saturates where infinity is nearest, from 61440 on; 0x7c are its bits.
    out.bits = static_cast<u8>(fabsf(value) >= 61440.0f ? pair & 0x80u | 0x7cu : pair);
//% else
    out.bits = float_to_f8e5m2(value);
//% endif
}
//% endif
//% if "float" in narrowed
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
//% endif
//% if "double" in narrowed
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
//% endif
//% if "float" in narrowed and "double" in computed
__device__ __forceinline__ void narrow(double value, float& out) { out = static_cast<float>(value); }
//% endif
//% if "bf16" in narrowed and "double" in computed
// Through float, as torch does; the second rounding is part of its semantics.
__device__ __forceinline__ void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "f16" in narrowed and "double" in computed
__device__ __forceinline__ void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "f8e4m3" in narrowed and "double" in computed
__device__ __forceinline__ void narrow(double value, f8e4m3& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "f8e5m2" in narrowed and "double" in computed
__device__ __forceinline__ void narrow(double value, f8e5m2& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "i8" in narrowed
__device__ __forceinline__ void narrow(i64 value, i8& out) { out = static_cast<i8>(value); }
//% endif
//% if "u8" in narrowed
__device__ __forceinline__ void narrow(i64 value, u8& out) { out = static_cast<u8>(value); }
//% endif
//% if "i16" in narrowed
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
//% endif
//% if "i32" in narrowed
__device__ __forceinline__ void narrow(i64 value, i32& out) { out = static_cast<i32>(value); }
//% endif
//% if "i64" in narrowed
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
//% endif
//% if "bool" in narrowed
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }
//% endif
