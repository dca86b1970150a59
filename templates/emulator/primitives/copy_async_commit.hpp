inline void copy_async_commit() { emulator::close_copies(); }
