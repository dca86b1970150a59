inline i32 cluster_rank() { return emulator::machine->current->block->index % emulator::machine->launch.cluster; }
