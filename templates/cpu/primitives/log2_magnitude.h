// log2 |x| of a float, in double (absolute error 2^-45 and relative near 1): exponent + 2 atanh(z) / ln 2, z = (m - 1) / (m + 1),
// with a minimax polynomial of degree 5 in z^2. Zero gives -infinity, infinity gives infinity; NaN is left to the caller.
FG_INLINE double log2_magnitude(float x) {
    const u64 sqrt_half = 0x3fe6a09e00000000u;
    const double magnitude = (double)__builtin_fabsf(x);
    const u64 bits = double_bits(magnitude) - sqrt_half;
    // the exponent without a 64-bit arithmetic shift or conversion: biased by 1024 it is positive, and it sits in the low bits of 2^52 + e
    const double exponent = double_from_bits(((bits + (1024ull << 52)) >> 52) | 0x4330000000000000u) - (0x1p52 + 1024.0);
    const double m = double_from_bits((bits & 0x000fffffffffffffu) + sqrt_half);
    const double z = (m - 1.0) / (m + 1.0);
    const double s = z * z;
    double p = 0x1.21b98448a3696p-2;
    p = multiply_add(p, s, 0x1.4794bfd2edf93p-2);
    p = multiply_add(p, s, 0x1.a61a325c7ca91p-2);
    p = multiply_add(p, s, 0x1.2776c28ed7348p-1);
    p = multiply_add(p, s, 0x1.ec709dc5402b7p-1);
    p = multiply_add(p, s, 0x1.71547652b824fp+1);
    const double finite = multiply_add(z, p, exponent);
    const double bounded = magnitude < __builtin_inf() ? finite : __builtin_inf();
    return magnitude == 0.0 ? -__builtin_inf() : bounded;
}
