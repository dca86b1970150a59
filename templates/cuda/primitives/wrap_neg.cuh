// -x; the least i64 is its own, as torch has it, where C++ leaves an overflow undefined.
__device__ __forceinline__ i64 wrap_neg(i64 x) { return static_cast<i64>(0 - static_cast<u64>(x)); }
