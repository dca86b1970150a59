template <typename T>
inline T shuffle_xor(T value, i32 mask) {
  emulator::shuffle(&value, sizeof(T), lane_id() ^ mask);
  return value;
}
