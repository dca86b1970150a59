// float to binary16 bits, to nearest even; NaN stays a (quiet) NaN.
// Selects with masks: g++ 12 does not vectorize selects of values that are narrowed to u16 in larger loops.
FG_INLINE u16 float_to_half(float value) {
#if defined(__aarch64__) || (defined(__clang__) && defined(__F16C__))
    const _Float16 half = (_Float16)value;
    u16 bits;
    __builtin_memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    const u32 rebias = (127u - 15u) << 23;
    const u32 bits = float_bits(value);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude - rebias + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    // one unit in the last place of 0.5f is the smallest half: the addition rounds
    const u32 subnormal = float_bits(float_from_bits(magnitude) + 0.5f) - float_bits(0.5f);
    const u32 nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    const u32 is_subnormal = 0u - (u32)(magnitude < float_bits(0x1p-14f));
    const u32 is_large = 0u - (u32)(magnitude >= float_bits(65520.0f));
    const u32 is_nan = 0u - (u32)(magnitude > float_bits(__builtin_inff()));
    const u32 finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
    const u32 ordered = (0x7c00u & is_large) | (finite & ~is_large);
    return (u16)((bits >> 16 & 0x8000u) | (nan & is_nan) | (ordered & ~is_nan));
#endif
}
