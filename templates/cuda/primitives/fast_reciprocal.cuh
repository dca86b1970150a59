// 1 / x within one unit in the last place.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
