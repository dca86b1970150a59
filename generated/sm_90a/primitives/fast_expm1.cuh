// e^x - 1, relative error 2^-18: minimax for small x, where the difference would cancel. Computes both and selects
// without a branch.
__device__ __forceinline__ float fast_expm1(float x) {
    float p = 0.0416592285f;
    p = fmaf(p, x, 0.166774541f);
    p = fmaf(p, x, 0.500000298f);
    const float small = fmaf(p * x, x, x), large = fast_exp(x) - 1.0f;
    return fabsf(x) < 0.125f ? small : large;
}
