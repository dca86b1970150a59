template <typename T>
inline T load(const T* base, i64 i) {
  T value;
  emulator::global_read(&value, base, i * static_cast<i64>(sizeof(T)), sizeof(T), sizeof(T));
  return value;
}
