template <typename T, typename Wide>
inline void load_wide(Wide (&dst)[2], const T* base, i64 i) {
  T pair[2];
  emulator::global_read(pair, base, i * static_cast<i64>(sizeof(T)), sizeof(pair), sizeof(pair));
  widen_vec(pair, dst);
}
