// -1, 0 or 1; 0 for NaN, as torch.sign.
//% if "float" in computed
__device__ __forceinline__ float sign_of(float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); }
//% endif
//% if "double" in computed
__device__ __forceinline__ double sign_of(double x) { return static_cast<double>((x > 0.0) - (x < 0.0)); }
//% endif
//% if "i64" in computed
__device__ __forceinline__ i64 sign_of(i64 x) { return (x > 0) - (x < 0); }
//% endif
