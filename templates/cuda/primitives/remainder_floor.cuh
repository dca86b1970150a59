// a - b * floor(a / b), torch.remainder: the result has the sign of the divisor. An integer modulo zero gives a.
//% if "float" in computed
__device__ __forceinline__ float remainder_floor(float a, float b) {
    float rest = fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
//% endif
//% if "double" in computed
__device__ __forceinline__ double remainder_floor(double a, double b) {
    double rest = fmod(a, b);
    return rest != 0.0 && (rest < 0.0) != (b < 0.0) ? rest + b : rest;
}
//% endif
//% if "i64" in computed
__device__ __forceinline__ i64 remainder_floor(i64 a, i64 b) {
    if (b == 0) return a;
    if (b == -1) return 0;  // the quotient of the least i64 would overflow
    i64 rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
//% endif
