// The nearest 8-bit float of 4 exponent bits (ties to even), as a float: an explicit cast inside a chain.
FG_INLINE float round_f8e4m3(float x) { return f8e4m3_to_float(float_to_f8e4m3(x)); }
