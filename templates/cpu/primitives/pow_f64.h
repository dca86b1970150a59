// x^y of the C library: one call an element, not vectorised.
FG_INLINE double pow_f64(double x, double y) { return __builtin_pow(x, y); }
