// Threads that wait may continue before this thread does anything else.
inline void mbarrier_arrive_cluster(u64* barrier, i32 rank) {
  emulator::arrive_at(rank, barrier);
  emulator::pause();
}
