// Square root, correctly rounded.
FG_INLINE float sqrt_f32(float x) { return __builtin_sqrtf(x); }
