// Permutes the bytes of a word: hexadecimal digit i of `order` is the number of the byte that becomes byte i; 4 gives 0.
__device__ __forceinline__ u32 permute_bytes(u32 word, u32 order) { return __byte_perm(word, 0u, order); }
