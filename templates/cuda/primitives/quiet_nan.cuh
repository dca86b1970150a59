// NaN as a float or double.
template <typename T>
__device__ __forceinline__ T quiet_nan() { return __uint_as_float(0x7fc00000u); }
