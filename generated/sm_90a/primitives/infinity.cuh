// Positive infinity as a float or double.
template <typename T>
__device__ __forceinline__ T infinity() { return __uint_as_float(0x7f800000u); }
