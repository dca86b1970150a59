template <typename T>
inline T cluster_load(emulator::SharedArray<T> array, i32 i, i32 rank) {
  T value;
  emulator::cluster_read(rank, &value, (array + i).offset, sizeof(T));
  return value;
}
