inline i32 lane_id() { return emulator::machine->current->index % 32; }
