// Converts the bits of an f8e4m3 to float, exactly; the largest magnitude is NaN.
__device__ __forceinline__ float f8e4m3_to_float(u8 bits) {
    const u32 sign = static_cast<u32>(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    const u32 subnormal = bit_cast<u32>(static_cast<float>(magnitude) * 0.001953125f);  // units of 2^-9
    const u32 normal = (magnitude << 20) + (120u << 23);  // the exponent's bias is 7, of float 127
    return bit_cast<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : magnitude < 8u ? subnormal : normal));
}
