inline void block_sync() { emulator::sync_block(); }
