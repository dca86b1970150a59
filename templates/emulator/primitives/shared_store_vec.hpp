template <int N, typename T>
inline void shared_store_vec(emulator::SharedArray<T> to, i32 i, const T (&src)[N]) {
  if (sizeof(T) < 4 && sizeof(src) % 4 == 0) emulator::check_shared("writes", (to + i).offset, 4);
  for (i32 k = 0; k < N; ++k) shared_store(to, i + k, src[k]);
}
