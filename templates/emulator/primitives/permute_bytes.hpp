inline u32 permute_bytes(u32 first, u32 second, u32 order) {
  const u64 both = static_cast<u64>(second) << 32 | first;
  u32 result = 0;
  for (i32 i = 0; i < 4; ++i) result |= static_cast<u32>(both >> 8 * (order >> 4 * i & 7u) & 255u) << 8 * i;
  return result;
}
