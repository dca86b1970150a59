// erf(x) of the C library: one call an element, not vectorised.
FG_INLINE double erf_f64(double x) { return __builtin_erf(x); }
