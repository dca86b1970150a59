// 2^n for -126 <= n <= 127, by its exponent field.
FG_INLINE float power_of_two(i32 n) { return float_from_bits((u32)(n + 127) << 23); }
