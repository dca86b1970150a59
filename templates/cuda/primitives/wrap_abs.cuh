// |x| in 64 bits, wrapping as in torch: the least i64 is unchanged. In C++ the overflow is undefined.
__device__ __forceinline__ i64 wrap_abs(i64 x) { return x < 0 ? wrap_neg(x) : x; }
