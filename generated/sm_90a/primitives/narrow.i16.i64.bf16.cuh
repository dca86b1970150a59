// Compute type to storage type: floats round to nearest even and keep NaN, integers wrap.
__device__ __forceinline__ void narrow(float value, bf16& out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
}
__device__ __forceinline__ void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
__device__ __forceinline__ void narrow(i64 value, i64& out) { out = value; }
