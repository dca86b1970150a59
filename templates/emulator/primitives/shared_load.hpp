template <typename T>
inline T shared_load(emulator::SharedArray<T> array, i32 i) {
  T value;
  emulator::shared_read(emulator::own_block(), &value, (array + i).offset, sizeof(T));
  return value;
}
