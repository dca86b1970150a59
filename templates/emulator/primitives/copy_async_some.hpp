// Completes when the thread waits for it; until then the emulator reports any access to the destination.
template <int W, typename T>
inline void copy_async_some(u32 to, const T* base, i64 j, i32 count) {
  constexpr i64 size = sizeof(T);
  if (count < 0 || count > W) emulator::fail("copies %d of %d elements", count, W);
  if constexpr (W * size >= 4) {
    emulator::start_copy(to, base, j * size, W * size, count * size);
  } else {
    T value = {};
    if (count > 0) value = load(base, j);
    emulator::shared_write(emulator::own_block(), to, &value, size);
  }
}
