// Applies .ftz to an operand or a result.
inline float flush_subnormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
