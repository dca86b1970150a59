// The nearest 8-bit float of 5 exponent bits (ties to even), as a float: an explicit cast inside a chain.
FG_INLINE float round_f8e5m2(float x) { return f8e5m2_to_float(float_to_f8e5m2(x)); }
