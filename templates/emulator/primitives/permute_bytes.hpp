inline u32 permute_bytes(u32 word, u32 order) {
  u32 result = 0;
  for (i32 i = 0; i < 4; ++i) {
    const u32 from = order >> 4 * i & 7u;
    if (from < 4) result |= (word >> 8 * from & 255u) << 8 * i;
  }
  return result;
}
