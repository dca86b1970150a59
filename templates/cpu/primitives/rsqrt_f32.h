// 1 / sqrt(x), two roundings.
FG_INLINE float rsqrt_f32(float x) { return 1.0f / __builtin_sqrtf(x); }
