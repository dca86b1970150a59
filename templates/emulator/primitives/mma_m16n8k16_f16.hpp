inline void mma_m16n8k16_f16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) {
  emulator::multiply_fragments_f16(d, a, b_left, b_right);
}
