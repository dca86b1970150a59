// Error function: x + x p(x^2) below 0.92 (p minimax, relative error 2^-30), else 1 - e^q(|x|)
// (q = log(erfc), minimax on 0.9 .. 4 weighted by erfc / erf, 2^-29); at 4 it has long been 1.
FG_INLINE float erf_f32(float x) {
    const float split = 0.92f;
    const float high = 4.0f;
    const float magnitude = __builtin_fabsf(x);
    const float s = x * x;
    float p = 7.99504851e-5f;
    p = multiply_add(p, s, -0.000804951473f);
    p = multiply_add(p, s, 0.00519239251f);
    p = multiply_add(p, s, -0.0268557295f);
    p = multiply_add(p, s, 0.112836257f);
    p = multiply_add(p, s, -0.376126289f);
    p = multiply_add(p, s, 0.128379166f);
    const float inner = multiply_add(x, p, x);

    float q = 0.000198220994f;
    q = multiply_add(q, magnitude, -0.00306549994f);
    q = multiply_add(q, magnitude, 0.0223152395f);
    q = multiply_add(q, magnitude, -0.104113713f);
    q = multiply_add(q, magnitude, -0.636976063f);
    q = multiply_add(q, magnitude, -1.12779725f);
    q = multiply_add(q, magnitude, -0.000166448241f);
    i32 n;
    const float r = exp_reduce(q, n);
    const float power = power_of_two(n);
    const float erfc = multiply_add(power, expm1_reduced(r), power);
    const float outer = __builtin_copysignf(magnitude > high ? 1.0f : 1.0f - erfc, x);
    return magnitude < split ? inner : outer;
}
