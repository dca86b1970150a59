inline void refuse_index(const char* message) { emulator::fail_index(message); }
