// Returns 0 for a finite x, and NaN otherwise: the term of a softmax's infinite maximum is e^(inf - inf).
template <typename T>
__device__ __forceinline__ T nan_unless_finite(T x) { return x - x; }
