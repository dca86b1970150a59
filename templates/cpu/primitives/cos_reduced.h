// cos(r) for |r| <= pi/4: 1 - r^2/2 + r^4 p(r^2), p minimax of degree 2 (2^-33).
FG_INLINE float cos_reduced(float r) {
    const float s = r * r;
    float p = 2.44306702e-5f;
    p = multiply_add(p, s, -0.00138873013f);
    p = multiply_add(p, s, 0.0416666456f);
    return multiply_add(s * s, p, multiply_add(-0.5f, s, 1.0f));
}
