template <i32 WIDTH, typename T>
inline T shuffle_xor_among(T value, i32 mask) {
  emulator::shuffle_among(&value, sizeof(T), lane_id() ^ mask, WIDTH);
  return value;
}
