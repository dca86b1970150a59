template <typename T>
inline T shuffle(T value, i32 source) {
  emulator::shuffle(&value, sizeof(T), source);
  return value;
}
