inline void wgmma_commit() { emulator::close_products(); }
