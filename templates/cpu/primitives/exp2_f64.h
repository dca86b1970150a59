// exp2(x) of the C library: one call an element, not vectorised.
FG_INLINE double exp2_f64(double x) { return __builtin_exp2(x); }
