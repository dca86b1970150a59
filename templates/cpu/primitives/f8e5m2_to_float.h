// Bits of an 8-bit float of 5 exponent bits to float, exactly.
FG_INLINE float f8e5m2_to_float(u8 element) {
    const u32 rebias = (127u - 15u) << 23;
    const u32 magnitude = element & 0x7fu;
    const u32 sign = (u32)(element & 0x80u) << 24;
    const u32 normal = (magnitude << 21) + rebias;
    const u32 inf_or_nan = normal + rebias;
    const u32 subnormal = float_bits((float)(i32)magnitude * 0x1p-16f);
    const u32 finite = magnitude < 0x04u ? subnormal : normal;
    return float_from_bits(sign | (magnitude >= 0x7cu ? inf_or_nan : finite));
}
