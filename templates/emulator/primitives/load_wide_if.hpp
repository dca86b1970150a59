template <typename T, typename Wide>
inline void load_wide_if(bool wanted, Wide (&dst)[2], const T* base, i64 i) {
  dst[0] = dst[1] = 0;
  if (wanted) load_wide(dst, base, i);
}
