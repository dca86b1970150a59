template <i32 PENDING>
inline void wgmma_wait() {
  emulator::finish_products(PENDING);
}
template <i32 PENDING, i32 REGISTERS>
inline void wgmma_wait(float (&accumulator)[REGISTERS]) {
  emulator::finish_products(PENDING);
}
