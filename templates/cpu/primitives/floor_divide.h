// torch.floor_divide. Floats as in Python: (a - fmod(a, b)) / b, which is nearly an integer, rounded.
// Integers: a / 0 is -1 (torch raises instead); the smallest integer over -1 wraps.
FG_INLINE float floor_divide(float a, float b) {
    const float r = __builtin_fmodf(a, b);
    const float exact = (a - r) / b;
    const float lowered = ((r != 0.0f) & ((b < 0.0f) != (r < 0.0f))) ? exact - 1.0f : exact;
    const float floored = __builtin_floorf(lowered);
    const float whole = lowered - floored > 0.5f ? floored + 1.0f : floored;
    const float result = lowered != 0.0f ? whole : __builtin_copysignf(0.0f, a / b);
    return b == 0.0f ? a / b : result;
}
FG_INLINE double floor_divide(double a, double b) {
    const double r = __builtin_fmod(a, b);
    const double exact = (a - r) / b;
    const double lowered = ((r != 0.0) & ((b < 0.0) != (r < 0.0))) ? exact - 1.0 : exact;
    const double floored = __builtin_floor(lowered);
    const double whole = lowered - floored > 0.5 ? floored + 1.0 : floored;
    const double result = lowered != 0.0 ? whole : __builtin_copysign(0.0, a / b);
    return b == 0.0 ? a / b : result;
}
FG_INLINE i64 floor_divide(i64 a, i64 b) {
    const i64 divisor = safe_divisor(b);
    const i64 quotient = a / divisor;
    const i64 r = a % divisor;
    const i64 floored = quotient - (i64)((r != 0) & ((b < 0) != (r < 0)));
    const i64 negated = (i64)(0u - (u64)a);
    return b == 0 ? -1 : (b == -1 ? negated : floored);
}
