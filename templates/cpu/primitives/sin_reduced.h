// sin(r) for |r| <= pi/4: r + r^3 p(r^2), p minimax of degree 2 for the relative error (2^-28);
// copies the sign of r, for -0.
FG_INLINE float sin_reduced(float r) {
    const float s = r * r;
    float p = -0.000195180954f;
    p = multiply_add(p, s, 0.00833218824f);
    p = multiply_add(p, s, -0.166666552f);
    return __builtin_copysignf(multiply_add(r * s, p, r), r);
}
