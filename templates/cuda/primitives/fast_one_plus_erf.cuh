// 1 + erf(x) = erfc(-x) without cancellation: erfc(z) = e^(-z^2) t p(t) with t = 1 / (1 + 0.52 z), the form of
// Hastings, Approximations for Digital Computers (1955); p is minimax on z from 0 to 9.4, relative error 2^-19, besides
// that of e^(-z^2).
__device__ __forceinline__ float fast_one_plus_erf(float x) {
    const float z = fabsf(x);
    const float t = fast_reciprocal(fmaf(0.52f, z, 1.0f));
    float p = 0.0965821743f;
    p = fmaf(p, t, -0.346992016f);
    p = fmaf(p, t, 0.310674936f);
    p = fmaf(p, t, 0.0815525651f);
    p = fmaf(p, t, 0.273492813f);
    p = fmaf(p, t, 0.291218847f);
    p = fmaf(p, t, 0.293471813f);
    const float tail = p * t * fast_exp(-(z * z));
    return x < 0.0f ? tail : 2.0f - tail;
}
