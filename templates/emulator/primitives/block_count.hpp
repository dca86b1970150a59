inline i32 block_count() { return emulator::machine->launch.grid; }
