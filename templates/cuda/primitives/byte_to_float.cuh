// Byte `byte` of a word, plus 2^23, less a number. The bytes of 2^23, with the byte as its last one, are the sum: no
// conversion is needed.
__device__ __forceinline__ float byte_to_float(u32 word, i32 byte, float less) {
    constexpr u32 TWO_TO_23 = 0x4b000000u;  // as a float
    return __uint_as_float(__byte_perm(word, TWO_TO_23, 0x7440u | static_cast<u32>(byte))) - less;
}
