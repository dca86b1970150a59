inline void counter_leave(u32* counter, u32 last) { emulator::advance_counter(counter, last, false); }
