inline i32 block_id() { return emulator::block_index(); }
