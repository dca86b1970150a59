template <typename T>
inline T shuffle_xor(T value, i32 mask) {
  emulator::Warp& warp = *emulator::machine->current->warp;
  i32 from = lane_id() ^ mask;
  if (from < 0 || from >= warp.shuffle.members) emulator::fail("shuffle_xor reads lane %d of a warp of %d", from, warp.shuffle.members);
  u64* passed = warp.passed[warp.shuffle.epoch % 2];
  memcpy(&passed[lane_id()], &value, sizeof(T));
  emulator::meet(warp.shuffle);
  memcpy(&value, &passed[from], sizeof(T));
  return value;
}
