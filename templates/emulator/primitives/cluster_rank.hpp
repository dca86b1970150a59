inline i32 cluster_rank() { return emulator::block_index() % emulator::cluster_size(); }
