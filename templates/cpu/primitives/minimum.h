// torch.minimum: NaN in either operand gives NaN.
FG_INLINE float minimum(float a, float b) { return ((a < b) | (a != a)) ? a : b; }
FG_INLINE double minimum(double a, double b) { return ((a < b) | (a != a)) ? a : b; }
FG_INLINE i64 minimum(i64 a, i64 b) { return a < b ? a : b; }
