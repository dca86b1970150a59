// The double with a given bit pattern.
FG_INLINE double double_from_bits(u64 bits) {
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
