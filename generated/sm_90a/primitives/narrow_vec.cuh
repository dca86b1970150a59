// narrow() for arrays.
template <i32 N, typename From, typename To>
__device__ __forceinline__ void narrow_vec(const From (&src)[N], To (&dst)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
