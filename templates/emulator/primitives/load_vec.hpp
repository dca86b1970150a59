template <int N, typename T>
inline void load_vec(T (&dst)[N], const T* base, i64 i) {
  emulator::global_read(dst, base, i * static_cast<i64>(sizeof(T)), sizeof(dst), vector_width(sizeof(dst)));
}
