inline void tma_store_2d(const TensorMap& map, const void* source, i32 x, i32 y) { emulator::store_tile(map, source, x, y); }
