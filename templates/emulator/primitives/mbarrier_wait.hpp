inline void mbarrier_wait(u64* barrier, u32 parity) { emulator::wait_for_phase(emulator::find_barrier(barrier), parity); }
