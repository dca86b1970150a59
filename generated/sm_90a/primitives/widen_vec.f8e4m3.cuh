// widen() for arrays.
template <i32 N, typename From, typename To>
__device__ __forceinline__ void widen_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) dst[k] = widen(src[k]);
}
// Pairs of f8e4m3: one instruction converts both to f16.
template <i32 N>
__device__ __forceinline__ void widen_vec(const f8e4m3 (&src)[N], float (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u16 pair;
        memcpy(&pair, &src[k], sizeof(pair));
        widen_e4m3x2(pair, dst[k], dst[k + 1]);
    }
    if constexpr (N % 2 != 0) dst[N - 1] = widen(src[N - 1]);
}
