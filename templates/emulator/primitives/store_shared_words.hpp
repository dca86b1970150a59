inline void store_shared_words(u32 address, float word) { emulator::write_word(address, word); }
inline void store_shared_words(u32 address, float first, float second) {
  if (address % 8) emulator::fail("misaligned: writes 8 bytes at byte %u of shared memory", address);
  emulator::write_word(address, first);
  emulator::write_word(address + 4, second);
}
