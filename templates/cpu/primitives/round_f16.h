// The nearest binary16 (ties to even), as a float: an explicit cast inside a chain.
FG_INLINE float round_f16(float x) { return half_to_float(float_to_half(x)); }
