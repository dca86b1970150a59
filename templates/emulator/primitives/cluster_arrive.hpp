inline void cluster_arrive() { emulator::arrive_at_cluster(); }
