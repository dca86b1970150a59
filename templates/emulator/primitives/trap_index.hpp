inline void trap_index(const char* message) { emulator::fail_index(message); }
