inline void tma_store_commit() { ++emulator::machine->current->store_groups; }
