inline i32 block_count() { return emulator::grid_size(); }
