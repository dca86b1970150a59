// log1p(x) of the C library: one call an element, not vectorised.
FG_INLINE double log1p_f64(double x) { return __builtin_log1p(x); }
