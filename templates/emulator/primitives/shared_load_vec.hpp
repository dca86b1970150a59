template <int N, typename T>
inline void shared_load_vec(T (&dst)[N], emulator::SharedArray<T> from, i32 i) {
  for (i32 k = 0; k < N; ++k) dst[k] = shared_load(from, i + k);
}
