// The smallest integer not below x.
FG_INLINE double ceil_f64(double x) { return __builtin_ceil(x); }
