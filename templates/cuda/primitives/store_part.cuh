// Stores elements `begin` to `end` of an aligned vector of N.
template <i32 N, typename T>
__device__ __forceinline__ void store_part(T* base, i64 i, const T (&src)[N], i64 begin, i64 end) {
    if (begin <= 0 && end >= N) {
        store_vec(base, i, src);
    } else {
#pragma unroll
        for (i32 v = 0; v < N; ++v) {
            if (v >= begin && v < end) store(base, i + v, src[v]);
        }
    }
}
