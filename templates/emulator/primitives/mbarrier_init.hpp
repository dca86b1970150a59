inline void mbarrier_init(u64* barrier, u32 arrivals) { emulator::init_barrier(barrier, arrivals); }
