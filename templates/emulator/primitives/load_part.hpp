// Elements of other rows, which other threads may be writing, are filled with NaN bits, so that a use of them shows in the result.
template <int N, typename T>
inline void load_part(T (&dst)[N], const T* base, i64 i, i64 begin, i64 end, i64 there) {
  if (there >= N) {
    emulator::check_global_read(base, i * static_cast<i64>(sizeof(T)), sizeof(dst), vector_width(sizeof(dst)));
  }
  memset(dst, 0xff, sizeof(dst));
  for (i32 v = 0; v < N; ++v) {
    if (v >= begin && v < end) dst[v] = load(base, i + v);
  }
}
