// log2(x) of the C library: one call an element, not vectorised.
FG_INLINE double log2_f64(double x) { return __builtin_log2(x); }
