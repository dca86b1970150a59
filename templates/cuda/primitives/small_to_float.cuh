// An integer below 2^23, plus 2^23, less a number: its bits are the fraction of a float of that size. No conversion is
// needed.
__device__ __forceinline__ float small_to_float(i32 x, float less) {
    return __uint_as_float(0x4b000000u | static_cast<u32>(x)) - less;
}
