inline void warp_sync() { emulator::sync_warp(); }
