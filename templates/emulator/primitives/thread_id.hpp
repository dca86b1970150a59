inline i32 thread_id() { return emulator::machine->current->index; }
