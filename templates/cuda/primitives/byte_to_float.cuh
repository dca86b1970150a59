// A byte of a word, plus 2^23, less a number: the byte is the end of a float of that size. No conversion is needed.
__device__ __forceinline__ float byte_to_float(u32 word, i32 byte, float less) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | static_cast<u32>(byte))) - less;
}
