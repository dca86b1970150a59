inline void warp_sync() { emulator::meet(emulator::machine->current->warp->sync); }
