// The float with a given bit pattern.
FG_INLINE float float_from_bits(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
