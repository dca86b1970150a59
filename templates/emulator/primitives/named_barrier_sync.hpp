inline void named_barrier_sync(i32 id, i32 threads) { emulator::meet_named(id, threads); }
