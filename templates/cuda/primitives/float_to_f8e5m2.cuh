// Converts a float to the bits of the nearest f8e5m2, ties to even; overflow gives infinity, NaN stays NaN.
__device__ __forceinline__ u8 float_to_f8e5m2(float value) {
    const u32 bits = bit_cast<u32>(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;  // NaN
    if (magnitude >= 0x47700000u) return static_cast<u8>(sign | 0x7cu);  // from 61440 on
    // One unit in the last place of 128 is the smallest element: the addition rounds
    const u32 subnormal = bit_cast<u32>(bit_cast<float>(magnitude) + 128.0f) - 0x43000000u;
    // The exponent's bias is 15, of float 127.
    const u32 normal = (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21;
    return static_cast<u8>(sign | (magnitude < 113u << 23 ? subnormal : normal));
}
