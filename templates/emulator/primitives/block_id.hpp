inline i32 block_id() { return emulator::machine->current->block->index; }
