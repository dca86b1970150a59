inline void block_sync() { emulator::meet(emulator::machine->current->block->sync); }
