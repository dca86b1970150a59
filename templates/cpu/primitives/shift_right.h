// torch's a >> count: the sign moves in; a count that is negative or too large leaves nothing but the sign.
FG_INLINE i64 shift_right(i64 a, i64 count) { return a >> ((u64)count < 63 ? count : 63); }
