// A divisor that cannot trap: 1 instead of 0 and of -1 (whose quotient may overflow).
FG_INLINE i64 safe_divisor(i64 b) { return ((b == 0) | (b == -1)) ? 1 : b; }
