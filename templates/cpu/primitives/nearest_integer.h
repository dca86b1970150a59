// The integer nearest to x factor, as float and as i32, for |x factor| < 2^22: adding 1.5 * 2^23 leaves it in the low bits of the sum.
FG_INLINE float nearest_integer(float x, float factor, i32& n) {
    const float shift = 0x1.8p23f;
    const float shifted = multiply_add(x, factor, shift);
    n = (i32)(float_bits(shifted) - float_bits(shift));
    return shifted - shift;
}
