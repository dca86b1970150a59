// The smallest integer not below x.
FG_INLINE float ceil_f32(float x) { return __builtin_ceilf(x); }
