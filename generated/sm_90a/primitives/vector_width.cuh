// Bytes of one memory access to a run of `bytes` bytes: the largest power of two that divides it, at most 16.
// It is also the alignment that load_vec and store_vec ask for.
__device__ __forceinline__ constexpr i32 vector_width(i32 bytes) {
  return bytes % 16 == 0 ? 16 : bytes & -bytes;
}
