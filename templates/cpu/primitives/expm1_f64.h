// expm1(x) of the C library: one call an element, not vectorised.
FG_INLINE double expm1_f64(double x) { return __builtin_expm1(x); }
