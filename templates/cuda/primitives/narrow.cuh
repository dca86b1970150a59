// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
//% if "bf16" in types
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
//% endif
//% if "f16" in types
__device__ __forceinline__ void narrow(float value, f16& out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
//% endif
//% if "float" in types
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
//% endif
//% if "double" in types
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
//% endif
//% if "float" in types and "double" in computed
__device__ __forceinline__ void narrow(double value, float& out) { out = static_cast<float>(value); }
//% endif
//% if "bf16" in types and "double" in computed
// Through float, as torch does; the second rounding is part of its semantics.
__device__ __forceinline__ void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "f16" in types and "double" in computed
__device__ __forceinline__ void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }
//% endif
//% if "i8" in types
__device__ __forceinline__ void narrow(i64 value, i8& out) { out = static_cast<i8>(value); }
//% endif
//% if "u8" in types
__device__ __forceinline__ void narrow(i64 value, u8& out) { out = static_cast<u8>(value); }
//% endif
//% if "i16" in types
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
//% endif
//% if "i32" in types
__device__ __forceinline__ void narrow(i64 value, i32& out) { out = static_cast<i32>(value); }
//% endif
//% if "i64" in types
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
//% endif
//% if "bool" in types
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }
//% endif
