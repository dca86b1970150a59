inline void tma_load_4d(void* destination, const TensorMap& map, u64* barrier, i32 x, i32 y, i32 z, i32 w) {
  const i32 at[4] = {x, y, z, w};
  emulator::load_tile(destination, map, barrier, 4, at);
}
