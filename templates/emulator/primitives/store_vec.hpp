template <int N, typename T>
inline void store_vec(T* base, i64 i, const T (&src)[N]) {
  emulator::global_write(base, i * static_cast<i64>(sizeof(T)), src, sizeof(src), vector_width(sizeof(src)));
}
