// The float of a `sort_key`.
__device__ __forceinline__ float sorted_value(i64 key) {
    constexpr i32 ABOVE_INFINITY = 0x7f800001, QUIET_NAN = 0x7fc00000;
    const i32 ordered = static_cast<i32>(key >> 32);
    const i32 bits = ordered < 0 ? ordered ^ 0x7fffffff : ordered == ABOVE_INFINITY ? QUIET_NAN : ordered;
    return bit_cast<float>(ordered == 0 && (key & 1) ? 0x80000000u : static_cast<u32>(bits));
}
