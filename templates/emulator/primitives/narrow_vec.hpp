template <int N, typename From, typename To>
inline void narrow_vec(const From (&src)[N], To (&dst)[N]) {
  for (i32 k = 0; k < N; ++k) narrow(src[k], dst[k]);
}
