inline i32 warp_id() { return emulator::machine->current->index / 32; }
