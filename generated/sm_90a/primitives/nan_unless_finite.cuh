// Returns 0 for a finite x, and NaN otherwise. The sum of a softmax adds it for the maximum of the row: if that is
// infinite, its term e^(inf - inf) is NaN.
template <typename T>
__device__ __forceinline__ T nan_unless_finite(T x) { return x - x; }
