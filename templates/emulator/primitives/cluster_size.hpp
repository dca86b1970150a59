inline i32 cluster_size() { return emulator::cluster_size(); }
