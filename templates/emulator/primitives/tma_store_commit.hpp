inline void tma_store_commit() { emulator::close_stores(); }
