// Square root, correctly rounded.
FG_INLINE double sqrt_f64(double x) { return __builtin_sqrt(x); }
