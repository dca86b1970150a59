// log(1 + x), relative error 2^-18: minimax for small x, which 1 + x would round away. Computes both and selects
// without a branch.
__device__ __forceinline__ float fast_log1p(float x) {
    float p = -0.250693887f;
    p = fmaf(p, x, 0.33398211f);
    p = fmaf(p, x, -0.499999583f);
    const float small = fmaf(p * x, x, x), large = fast_log(1.0f + x);
    return fabsf(x) < 0.0625f ? small : large;
}
