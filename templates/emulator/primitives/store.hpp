template <typename T>
inline void store(T* base, i64 i, T value) {
  emulator::global_write(base, i * static_cast<i64>(sizeof(T)), &value, sizeof(T), sizeof(T));
}
