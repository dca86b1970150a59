inline void copy_async_commit() { ++emulator::machine->current->copy_groups; }
