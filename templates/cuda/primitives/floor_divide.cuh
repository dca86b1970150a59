// floor(a / b), torch.floor_divide. Floats take it from the exact fmod, since a / b may round up to the next integer.
// An integer divided by zero gives -1, as on the GPU.
//% if "float" in computed or "double" in computed
template <typename Real>
__device__ __forceinline__ Real floor_divide_exact(Real a, Real b, Real rest) {
    Real quotient = (a - rest) / b;
    if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
    if (quotient == 0) return copysign(Real(0), a / b);
    Real whole = floor(quotient);
    return quotient - whole > Real(0.5) ? whole + 1 : whole;
}
//% endif
//% if "float" in computed
__device__ __forceinline__ float floor_divide(float a, float b) {
    return b == 0.0f ? a / b : floor_divide_exact(a, b, fmodf(a, b));
}
//% endif
//% if "double" in computed
__device__ __forceinline__ double floor_divide(double a, double b) {
    return b == 0.0 ? a / b : floor_divide_exact(a, b, fmod(a, b));
}
//% endif
//% if "i64" in computed
__device__ __forceinline__ i64 floor_divide(i64 a, i64 b) {
    if (b == 0) return -1;
    if (b == -1) return static_cast<i64>(0 - static_cast<u64>(a));  // wraps at the least i64
    i64 quotient = a / b;
    return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
//% endif
