inline void wait_for_previous() { emulator::end_wait_for_previous(); }
