// Takes four of the bytes of two words: hexadecimal digit i of `order` is the number of byte i, from 4 on a byte of the
// second word.
__device__ __forceinline__ u32 permute_bytes(u32 first, u32 second, u32 order) {
    return __byte_perm(first, second, order);
}
