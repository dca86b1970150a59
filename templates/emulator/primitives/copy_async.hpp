// Completes when the thread waits for it; until then the emulator reports any access to the destination.
template <int W, typename T>
inline void copy_async(emulator::SharedArray<T> to, i32 i, const T* base, i64 j) {
  emulator::start_copy((to + i).offset, base, j * static_cast<i64>(sizeof(T)), W * sizeof(T), W * sizeof(T));
}
