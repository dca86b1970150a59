inline void mbarrier_expect(u64* barrier, u32 bytes) { emulator::arrive(emulator::find_barrier(barrier), bytes); }
