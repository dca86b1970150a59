// The bit pattern of a double (IEEE 754 binary64).
FG_INLINE u64 double_bits(double value) {
    u64 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
