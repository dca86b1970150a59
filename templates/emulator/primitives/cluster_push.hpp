template <typename T>
inline void cluster_push(emulator::SharedArray<T> array, i32 i, T value, i32 rank, u64* barrier) {
  emulator::push(rank, (array + i).offset, &value, sizeof(T), barrier);
}
