// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, f16& out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(double value, float& out) { out = static_cast<float>(value); }
// Through float, as torch does; the second rounding is part of its semantics.
__device__ __forceinline__ void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
__device__ __forceinline__ void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }
__device__ __forceinline__ void narrow(i64 value, i8& out) { out = static_cast<i8>(value); }
__device__ __forceinline__ void narrow(i64 value, u8& out) { out = static_cast<u8>(value); }
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
__device__ __forceinline__ void narrow(i64 value, i32& out) { out = static_cast<i32>(value); }
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
__device__ __forceinline__ void narrow(bool value, bool& out) { out = value; }
