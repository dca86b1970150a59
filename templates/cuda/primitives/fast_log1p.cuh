// log(1 + x), relative error 2^-18: minimax for small x, where the logarithm of a rounded sum would lose them.
__device__ __forceinline__ float fast_log1p(float x) {
  float p = -0.250693887f;
  p = fmaf(p, x, 0.33398211f);
  p = fmaf(p, x, -0.499999583f);
  return fabsf(x) < 0.0625f ? fmaf(p * x, x, x) : fast_log(1.0f + x);
}
