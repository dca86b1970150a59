// float to bits of an 8-bit float of 4 exponent bits, to nearest even. Values beyond 448 become 448 (no infinity), as in torch;
// NaN stays NaN. Selected with masks, as in float_to_half.
FG_INLINE u8 float_to_f8e4m3(float value) {
    const u32 rebias = (127u - 7u) << 23;
    const u32 bits = float_bits(value);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude - rebias + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    // one unit in the last place of 16384.0f is the smallest element: the addition rounds
    const u32 subnormal = float_bits(float_from_bits(magnitude) + 16384.0f) - float_bits(16384.0f);
    const u32 is_subnormal = 0u - (u32)(magnitude < float_bits(0x1p-6f));
    const u32 is_large = 0u - (u32)(magnitude >= float_bits(464.0f));
    const u32 is_nan = 0u - (u32)(magnitude > float_bits(__builtin_inff()));
    const u32 finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
    const u32 ordered = (0x7eu & is_large) | (finite & ~is_large);
    return (u8)((bits >> 24 & 0x80u) | (0x7fu & is_nan) | (ordered & ~is_nan));
}
