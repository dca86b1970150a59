template <i32 PENDING>
inline void tma_store_wait() {
  emulator::finish_stores(PENDING);
}
