// torch.remainder: a - b floor(a / b), with the sign of b. Floats call the C library's fmod (exact), one call an element.
// Integers: a mod 0 is a (torch raises instead), which keeps a == b floor_divide(a, b) + remainder_floor(a, b).
FG_INLINE float remainder_floor(float a, float b) {
    const float r = __builtin_fmodf(a, b);
    return ((r != 0.0f) & ((b < 0.0f) != (r < 0.0f))) ? r + b : r;
}
FG_INLINE double remainder_floor(double a, double b) {
    const double r = __builtin_fmod(a, b);
    return ((r != 0.0) & ((b < 0.0) != (r < 0.0))) ? r + b : r;
}
FG_INLINE i64 remainder_floor(i64 a, i64 b) {
    const i64 r = a % safe_divisor(b);
    const i64 floored = ((r != 0) & ((b < 0) != (r < 0))) ? r + b : r;
    return b == 0 ? a : floored;
}
