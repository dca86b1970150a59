// Converts a float to the bits of the nearest f8e4m3, ties to even. Values beyond 448 become 448 (no infinity); NaN
// stays NaN.
__device__ __forceinline__ u8 float_to_f8e4m3(float value) {
    const u32 bits = bit_cast<u32>(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;  // NaN
    if (magnitude >= 0x43e80000u) return static_cast<u8>(sign | 0x7eu);  // from 464 on
    // One unit in the last place of 16384 is the smallest element: the addition rounds
    const u32 subnormal = bit_cast<u32>(bit_cast<float>(magnitude) + 16384.0f) - 0x46800000u;
    // The exponent's bias is 7, of float 127.
    const u32 normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    return static_cast<u8>(sign | (magnitude < 121u << 23 ? subnormal : normal));
}
