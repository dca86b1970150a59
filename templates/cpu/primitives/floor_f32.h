// The largest integer not above x.
FG_INLINE float floor_f32(float x) { return __builtin_floorf(x); }
