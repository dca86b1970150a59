// log(1 + f) - f for sqrt(1/2) <= 1 + f < sqrt(2): -f^2/2 + f^3 p(f), p minimax of degree 8 for the relative error of the logarithm (2^-27.5).
FG_INLINE float log1p_tail(float f) {
    float p = 0.0527786836f;
    p = multiply_add(p, f, -0.108994529f);
    p = multiply_add(p, f, 0.121113256f);
    p = multiply_add(p, f, -0.125495672f);
    p = multiply_add(p, f, 0.142096385f);
    p = multiply_add(p, f, -0.16659373f);
    p = multiply_add(p, f, 0.200022221f);
    p = multiply_add(p, f, -0.250001669f);
    p = multiply_add(p, f, 0.333333135f);
    return f * f * multiply_add(f, p, -0.5f);
}
