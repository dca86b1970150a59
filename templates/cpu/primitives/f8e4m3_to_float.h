// Bits of an 8-bit float of 4 exponent bits to float, exactly; the largest magnitude is NaN.
FG_INLINE float f8e4m3_to_float(u8 element) {
    const u32 magnitude = element & 0x7fu;
    const u32 sign = (u32)(element & 0x80u) << 24;
    const u32 normal = (magnitude << 20) + ((127u - 7u) << 23);
    const u32 subnormal = float_bits((float)(i32)magnitude * 0x1p-9f);
    const u32 finite = magnitude < 0x08u ? subnormal : normal;
    return float_from_bits(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}
