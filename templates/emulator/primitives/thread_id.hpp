inline i32 thread_id() { return emulator::thread_index(); }
