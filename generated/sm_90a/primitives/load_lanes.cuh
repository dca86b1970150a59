// Loads N consecutive elements in aligned accesses of W elements.
template <i32 W, i32 N, typename T>
__device__ __forceinline__ void load_lanes(T (&dst)[N], const T* base, i64 i) {
    if constexpr (W == N) {
        load_vec(dst, base, i);
    } else {
#pragma unroll
        for (i32 k = 0; k < N; k += W) {
            T part[W];
            load_vec(part, base, i + k);
#pragma unroll
            for (i32 j = 0; j < W; ++j) dst[k + j] = part[j];
        }
    }
}
