// Of N consecutive elements, which start an aligned access, those from `begin` to `end`; the others are of no use. They are brought
// along where the memory holds all N, of which it has `there`.
template <int N, typename T>
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
