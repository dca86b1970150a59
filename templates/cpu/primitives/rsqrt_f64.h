// 1 / sqrt(x), two roundings.
FG_INLINE double rsqrt_f64(double x) { return 1.0 / __builtin_sqrt(x); }
