// binary16 bits to float, exactly. g++ 12 on x86 does not vectorize conversions of _Float16, even with AVX512-FP16; integer
// arithmetic is several times as fast there.
FG_INLINE float half_to_float(u16 half) {
#if defined(__aarch64__) || (defined(__clang__) && defined(__F16C__))
    _Float16 value;
    __builtin_memcpy(&value, &half, sizeof value);
    return (float)value;
#else
    const u32 rebias = (127u - 15u) << 23;
    const u32 magnitude = half & 0x7fffu;
    const u32 sign = (u32)(half & 0x8000u) << 16;
    const u32 normal = (magnitude << 13) + rebias;
    const u32 inf_or_nan = normal + rebias;
    const u32 subnormal = float_bits((float)(i32)magnitude * 0x1p-24f);
    const u32 finite = magnitude < 0x0400u ? subnormal : normal;
    return float_from_bits(sign | (magnitude >= 0x7c00u ? inf_or_nan : finite));
#endif
}
