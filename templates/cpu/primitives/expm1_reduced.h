// e^r - 1 for |r| <= ln(2)/2: r + r^2 q(r), q minimax of degree 5 for the relative error of e^r - 1 (2^-28).
FG_INLINE float expm1_reduced(float r) {
    float q = 0.000150461841f;
    q = multiply_add(q, r, 0.00139305426f);
    q = multiply_add(q, r, 0.00834150985f);
    q = multiply_add(q, r, 0.0416665114f);
    q = multiply_add(q, r, 0.166666359f);
    q = multiply_add(q, r, 0.5f);
    return multiply_add(r * r, q, r);
}
