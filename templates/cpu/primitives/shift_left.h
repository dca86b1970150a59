// a << count, as torch: wraps to 64 bits; a negative or too large count gives 0.
FG_INLINE i64 shift_left(i64 a, i64 count) {
    const bool fits = (u64)count < 64;
    const u64 moved = (u64)a << (fits ? (u64)count : 0u);
    return fits ? (i64)moved : 0;
}
