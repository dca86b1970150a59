// x without its fraction.
FG_INLINE double trunc_f64(double x) { return __builtin_trunc(x); }
