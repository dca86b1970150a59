inline void mbarrier_init_fence() { emulator::show_barriers(); }
