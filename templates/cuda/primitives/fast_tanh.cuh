// Hyperbolic tangent, relative error below 2^-10: for 16-bit outputs.
__device__ __forceinline__ float fast_tanh(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
