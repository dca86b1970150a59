template <typename T>
inline void shared_store(emulator::SharedArray<T> array, i32 i, T value) {
  emulator::shared_write(emulator::own_block(), (array + i).offset, &value, sizeof(T));
}
