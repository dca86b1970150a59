// narrow() for arrays.
template <i32 N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
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
