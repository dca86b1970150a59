// Threads that wait may continue before this thread does anything else.
inline void mbarrier_arrive(u64* barrier) {
  emulator::arrive(emulator::find_barrier(barrier), 0);
  emulator::pause();
}
