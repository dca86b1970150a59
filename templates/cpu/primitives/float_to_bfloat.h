// float to bfloat16 bits, to nearest even; NaN stays a (quiet) NaN.
FG_INLINE u16 float_to_bfloat(float value) {
    const u32 bits = float_bits(value);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32 nan = (bits >> 16) | 0x0040u;
    return (u16)(value != value ? nan : rounded);
}
