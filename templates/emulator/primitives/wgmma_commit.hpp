inline void wgmma_commit() {
  emulator::Thread& thread = *emulator::machine->current;
  ++thread.product_groups;
  thread.products_fenced = false;
}
