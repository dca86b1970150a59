inline void cluster_sync() {
  emulator::arrive_at_cluster();
  emulator::wait_for_cluster();
}
