inline i32 cluster_size() { return emulator::machine->launch.cluster; }
