inline void store_shared_words(u32 address, u32 word) { emulator::write_word(address, word); }
inline void store_shared_words(u32 address, float first, float second) {
  if (address % 8) emulator::fail("misaligned: writes 8 bytes at byte %u of shared memory", address);
  emulator::write_word(address, __float_as_uint(first));
  emulator::write_word(address + 4, __float_as_uint(second));
}
