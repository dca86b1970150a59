// An integer from 0 to 2^23 - 1, plus 2^23, less a number. The integer's bits are the fraction of the sum: no
// conversion is needed.
__device__ __forceinline__ float small_to_float(i32 x, float less) {
    constexpr u32 TWO_TO_23 = 0x4b000000u;  // as a float
    return __uint_as_float(TWO_TO_23 | static_cast<u32>(x)) - less;
}
