// torch's a << count: what leaves 64 bits is lost, and a count that is negative or too large gives 0.
FG_INLINE i64 shift_left(i64 a, i64 count) {
    const bool fits = (u64)count < 64;
    const u64 moved = (u64)a << (fits ? (u64)count : 0u);
    return fits ? (i64)moved : 0;
}
