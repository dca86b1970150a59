// Copies at once: what the emulator checks is where from and where to, not that somebody waits.
template <int W, typename T>
inline void copy_async(emulator::SharedArray<T> to, i32 i, const T* base, i64 j) {
  T part[W];
  emulator::global_read(part, base, j * static_cast<i64>(sizeof(T)), sizeof(part), sizeof(part));
  emulator::shared_write(*emulator::machine->current->block, (to + i).offset, part, sizeof(part));
}
