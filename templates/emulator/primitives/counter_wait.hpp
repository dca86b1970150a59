inline void counter_wait(const u32* counter, u32 count) { emulator::wait_for_counter(counter, count); }
