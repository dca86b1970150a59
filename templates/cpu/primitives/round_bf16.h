// The nearest bfloat16 (ties to even), as a float: an explicit cast inside a chain.
FG_INLINE float round_bf16(float x) { return float_from_bits((u32)float_to_bfloat(x) << 16); }
