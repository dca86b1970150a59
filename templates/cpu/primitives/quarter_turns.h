// x = quadrant pi/2 + r with |r| <= pi/4 (quadrant modulo 4), for every finite float; infinity and NaN give NaN.
// The turns x / 2 pi are summed from products with four chunks of 1 / 2 pi. Three have 29 bits, so that a product with 24 bits is
// exact in double and its whole turns drop out exactly. From 2^74 on x is a multiple of 2^51: the leading 51 bits only give whole turns.
FG_INLINE float quarter_turns(float x, u32& quadrant) {
    const float large = 0x1p74f;
    const double half_pi = 0x1.921fb54442d18p+0;
    const float never_reduced = 0.785f;
    const float shift = 0x1.8p23f;
    const bool is_large = __builtin_fabsf(x) >= large;
    const double a = (double)x * (is_large ? 0x1.529fc24000000p-54 : 0x1.45f306d000000p-3);
    const double b = (double)x * (is_large ? 0x1.abe8fa9000000p-81 : 0x1.9391054000000p-32);
    const double c = (double)x * (is_large ? 0x1.4ddc0db000000p-110 : 0x1.4fe13ab000000p-61);
    const double d = (double)x * (is_large ? 0x1.8a5664f10e410p-140 : 0x1.d1f534ddc0db6p-90);
    const double turns = ((a - __builtin_rint(a)) + (b - __builtin_rint(b))) + ((c - __builtin_rint(c)) + d);
    const double quarters = 4.0 * turns;
    const double nearest = __builtin_rint(quarters);
    quadrant = float_bits((float)nearest + shift) & 3u;
    const float r = (float)((quarters - nearest) * half_pi);
    return __builtin_fabsf(x) < never_reduced ? x : r;
}
