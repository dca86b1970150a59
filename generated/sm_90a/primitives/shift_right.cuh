// torch's a >> count: the sign moves in; a count that is negative or too large leaves nothing but the sign.
__device__ __forceinline__ i64 shift_right(i64 a, i64 count) { return a >> (static_cast<u64>(count) < 63 ? count : 63); }
