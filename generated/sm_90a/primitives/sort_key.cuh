// An integer that sorts like the float, with NaN greatest, -0 equal to 0, and ties by index (below 2^31): the ordered
// bits of the value, the index, and a bit for -0.
__device__ __forceinline__ i64 sort_key(float x, i64 index) {
    constexpr i32 ABOVE_INFINITY = 0x7f800001;
    const i32 bits = bit_cast<i32>(x);
    const i32 ordered = x != x ? ABOVE_INFINITY : x == 0.0f ? 0 : bits < 0 ? bits ^ 0x7fffffff : bits;
    const i64 last = x == 0.0f && bits < 0;
    return static_cast<i64>(ordered) * (1LL << 32) + index * 2 + last;
}
