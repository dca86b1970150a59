template <typename T>
inline emulator::SharedArray<T> shared_array(u32 byte_offset) {
  return {byte_offset};
}
