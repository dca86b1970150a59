// 2^x in double, relative error 2^-34, to be rounded to float; x is clamped to where a float is 0 or infinity.
FG_INLINE double exp2_double(double x) {
    const double bound = 300.0;
    const double shift = 0x1.8p52;
    const double bounded = x < -bound ? -bound : (x > bound ? bound : x);
    const double shifted = bounded + shift;
    const double r = bounded - (shifted - shift);
    double p = 0x1.fe169f8538837p-17;
    p = multiply_add(p, r, 0x1.446ad3aa83510p-13);
    p = multiply_add(p, r, 0x1.5d8a730bacca0p-10);
    p = multiply_add(p, r, 0x1.3b29db622c286p-7);
    p = multiply_add(p, r, 0x1.c6b08aaaf1243p-5);
    p = multiply_add(p, r, 0x1.ebfbe0a5c5b4ap-3);
    p = multiply_add(p, r, 0x1.62e42ff119222p-1);
    p = multiply_add(p, r, 0x1.ffffffffab122p-1);
    return p * double_from_bits((double_bits(shifted) - double_bits(shift) + 1023u) << 52);
}
