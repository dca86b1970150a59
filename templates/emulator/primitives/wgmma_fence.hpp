inline void wgmma_fence() { emulator::machine->current->products_fenced = true; }
