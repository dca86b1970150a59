template <typename T>
inline void prefetch_l2(const T* base, i64 i, u32 bytes) {
  if (bytes % 16) emulator::fail("prefetch_l2 of %u bytes, which is no multiple of 16", bytes);
  emulator::check_global_read(base, i * static_cast<i64>(sizeof(T)), bytes, 16);
}
