template <int PENDING>
inline void copy_async_wait() {
  emulator::finish_copies(PENDING);
}
