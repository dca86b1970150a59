// The largest integer not above x.
FG_INLINE double floor_f64(double x) { return __builtin_floor(x); }
