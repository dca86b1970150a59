inline void counter_advance(u32* counter, u32 last) { emulator::advance_counter(counter, last, true); }
