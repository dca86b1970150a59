// tanh: x + x^3 p(x^2) below 0.55 (p minimax of degree 4, relative error 2^-29), else 1 - 2 / (e^(2|x|) + 1); constant 1 long
// before 10.
FG_INLINE float tanh_f32(float x) {
    const float split = 0.55f;
    const float high = 10.0f;
    const float magnitude = __builtin_fabsf(x);
    const float s = x * x;
    float p = -0.0062428494f;
    p = multiply_add(p, s, 0.021050714f);
    p = multiply_add(p, s, -0.0538475476f);
    p = multiply_add(p, s, 0.133325443f);
    p = multiply_add(p, s, -0.333333164f);
    const float inner = multiply_add(magnitude, s * p, magnitude);

    i32 n;
    const float r = exp_reduce(2.0f * magnitude, n);
    const float power = power_of_two(n);
    const float exp_plus_one = multiply_add(power, expm1_reduced(r), power + 1.0f);
    const float outer = magnitude > high ? 1.0f : 1.0f - 2.0f / exp_plus_one;
    return __builtin_copysignf(magnitude < split ? inner : outer, x);
}
