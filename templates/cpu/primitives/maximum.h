// torch.maximum: NaN in either operand gives NaN.
FG_INLINE float maximum(float a, float b) { return ((a > b) | (a != a)) ? a : b; }
FG_INLINE double maximum(double a, double b) { return ((a > b) | (a != a)) ? a : b; }
FG_INLINE i64 maximum(i64 a, i64 b) { return a > b ? a : b; }
