inline void cluster_wait() { emulator::wait_for_cluster(); }
