// narrow() for arrays.
template <i32 N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
//% if "bf16" in narrowed
// Pairs of bf16: one instruction for two elements.
template <i32 N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], bf16 (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[k + 1]), "f"(src[k]));
        memcpy(&dst[k], &pair, sizeof(pair));
    }
    if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}
//% endif
//% if "f16" in narrowed
// Pairs of f16: one instruction for two elements.
template <i32 N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], f16 (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[k + 1]), "f"(src[k]));
        memcpy(&dst[k], &pair, sizeof(pair));
    }
    if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}
//% endif
//% if "f8e4m3" in narrowed and converts_float8
// Pairs of f8e4m3: one instruction for two elements.
template <i32 N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], f8e4m3 (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(src[k + 1]), "f"(src[k]));
        memcpy(&dst[k], &pair, sizeof(pair));
    }
    if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}
//% endif
//% if "f8e5m2" in narrowed and converts_float8
// Pairs of f8e5m2: one instruction for two elements, which saturates where infinity is nearest, from 61440 on.
template <i32 N>
__device__ __forceinline__ void narrow_vec(const float (&src)[N], f8e5m2 (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(src[k + 1]), "f"(src[k]));
        if (fabsf(src[k]) >= 61440.0f) pair = pair & 0xff80u | 0x007cu;  // the sign, and the bits of infinity
        if (fabsf(src[k + 1]) >= 61440.0f) pair = pair & 0x80ffu | 0x7c00u;
        memcpy(&dst[k], &pair, sizeof(pair));
    }
    if constexpr (N % 2 != 0) narrow(src[N - 1], dst[N - 1]);
}
//% endif
