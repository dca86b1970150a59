// a * b + c, rounded once if the CPU has FMA; elsewhere twice, since fma of the C library is a call per element. Used only inside
// of one operation: compilers contract nothing, so that a value is the same wherever it is used.
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMAF)
FG_INLINE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FG_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
FG_INLINE float multiply_add(float a, float b, float c) { return a * b + c; }
FG_INLINE double multiply_add(double a, double b, double c) { return a * b + c; }
#endif
