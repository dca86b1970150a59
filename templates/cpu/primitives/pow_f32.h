// x^y = 2^(y log2 |x|) in double, with the signs and special values of C's pow.
FG_INLINE float pow_f32(float x, float y) {
    const double exponent = (double)y * log2_magnitude(x);
    const float magnitude = (float)exp2_double(exponent);
    const bool negative = (i32)float_bits(x) < 0;
    const bool whole = __builtin_rintf(y) == y;
    const bool odd = whole & (__builtin_rintf(0.5f * y) != 0.5f * y);
    const bool no_real_root = (x < 0.0f) & (x > -__builtin_inff()) & !whole;
    const float signed_value = (negative & odd) ? -magnitude : magnitude;
    const float rooted = no_real_root ? __builtin_nanf("") : signed_value;
    const float ordered = ((x != x) | (y != y)) ? x + y : rooted;
    const bool unit_to_infinity = (x == -1.0f) & (__builtin_fabsf(y) == __builtin_inff());
    return ((x == 1.0f) | (y == 0.0f) | unit_to_infinity) ? 1.0f : ordered;
}
