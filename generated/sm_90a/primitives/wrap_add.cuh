// a + b of 64 bits: what leaves them is lost, as torch has it, where C++ leaves an overflow undefined.
__device__ __forceinline__ i64 wrap_add(i64 a, i64 b) {
  return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
}
