using emulator::SharedArray;
template <typename T>
inline SharedArray<T> shared_array(u32 byte_offset) {
  return {byte_offset};
}
