// The nearest integer, ties to even (torch.round).
FG_INLINE double rint_f64(double x) { return __builtin_rint(x); }
