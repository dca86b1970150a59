template <typename T>
inline void load_stream(u32 (&dst)[4], const T* base, i64 i) {
  emulator::global_read(dst, base, i * static_cast<i64>(sizeof(T)), sizeof(dst), sizeof(dst));
}
