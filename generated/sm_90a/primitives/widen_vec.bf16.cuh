// widen() for arrays.
template <i32 N, typename From, typename To>
__device__ __forceinline__ void widen_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) dst[k] = widen(src[k]);
}
// Pairs of bf16: one instruction per element, on a register that holds both.
template <i32 N>
__device__ __forceinline__ void widen_vec(const bf16 (&src)[N], float (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k + 1 < N; k += 2) {
        u32 pair;
        memcpy(&pair, &src[k], sizeof(pair));
        dst[k] = bit_cast<float>(pair << 16);
        dst[k + 1] = bit_cast<float>(pair & 0xffff0000u);
    }
    if constexpr (N % 2 != 0) dst[N - 1] = widen(src[N - 1]);
}
