// Loads elements `begin` to `end` of an aligned vector of N; the others are unspecified. `there` elements are in
// memory: if all N are, one access loads the whole vector.
template <i32 N, typename T>
__device__ __forceinline__ void load_part(T (&dst)[N], const T* base, i64 i, i64 begin, i64 end, i64 there) {
    if (there >= N) {
        load_vec(dst, base, i);
    } else {
#pragma unroll
        for (i32 v = 0; v < N; ++v) {
            if (v >= begin && v < end) dst[v] = load(base, i + v);
        }
    }
}
