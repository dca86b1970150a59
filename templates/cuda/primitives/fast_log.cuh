// Natural logarithm; absolute error about 1e-7 near 1, where its relative error grows.
__device__ __forceinline__ float fast_log(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result * 0.6931471805599453f;
}
