inline void mbarrier_wait_cluster(u64* barrier, u32 parity) {
  emulator::wait_for_blocks(emulator::find_barrier(barrier), parity);
}
