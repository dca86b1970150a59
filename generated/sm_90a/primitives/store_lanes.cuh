// Stores N consecutive elements in aligned accesses of W elements.
template <i32 W, i32 N, typename T>
__device__ __forceinline__ void store_lanes(T* base, i64 i, const T (&src)[N]) {
    if constexpr (W == N) {
        store_vec(base, i, src);
    } else {
#pragma unroll
        for (i32 k = 0; k < N; k += W) {
            T part[W];
#pragma unroll
            for (i32 j = 0; j < W; ++j) part[j] = src[k + j];
            store_vec(base, i + k, part);
        }
    }
}
