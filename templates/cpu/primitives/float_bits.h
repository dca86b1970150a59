// The bit pattern of a float (IEEE 754 binary32).
FG_INLINE u32 float_bits(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
