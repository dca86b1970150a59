template <typename T>
inline T shuffle_up(T value, i32 distance) {
  return shuffle_xor(value, lane_id() < distance ? 0 : lane_id() ^ (lane_id() - distance));
}
