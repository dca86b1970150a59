inline void cluster_sync() { emulator::meet(emulator::machine->cluster_sync); }
