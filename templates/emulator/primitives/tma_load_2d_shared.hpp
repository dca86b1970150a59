inline void tma_load_2d_shared(void* destination, const TensorMap& map, u64* barrier, i32 x, i32 y, u16 blocks) {
  const i32 at[2] = {x, y};
  emulator::load_tile(destination, map, barrier, 2, at, blocks);
}
