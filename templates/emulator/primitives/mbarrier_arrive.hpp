// Whoever waits for this may go on before the thread does anything else.
inline void mbarrier_arrive(u64* barrier) {
  emulator::arrive(emulator::find_barrier(barrier), 0);
  emulator::pause();
}
