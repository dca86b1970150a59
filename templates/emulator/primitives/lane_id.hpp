inline i32 lane_id() { return emulator::thread_index() % 32; }
