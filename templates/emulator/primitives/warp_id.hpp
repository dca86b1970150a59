inline i32 warp_id() { return emulator::thread_index() / 32; }
