// -x in 64 bits, wrapping as in torch: the least i64 is unchanged. In C++ the overflow is undefined.
__device__ __forceinline__ i64 wrap_neg(i64 x) { return static_cast<i64>(0 - static_cast<u64>(x)); }
