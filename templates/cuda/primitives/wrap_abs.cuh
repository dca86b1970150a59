// |x|; the least i64 stays what it is, as torch has it, where C++ leaves an overflow undefined.
__device__ __forceinline__ i64 wrap_abs(i64 x) { return x < 0 ? wrap_neg(x) : x; }
