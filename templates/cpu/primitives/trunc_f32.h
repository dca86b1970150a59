// x without its fraction.
FG_INLINE float trunc_f32(float x) { return __builtin_truncf(x); }
