// Converts four packed f8e5m2, the upper bytes of f16, to two words of packed f16.
__device__ __forceinline__ void cvt_f16x4_f8e5m2(u32 (&halves)[2], u32 word) {
    halves[0] = permute_bytes(word, 0u, 0x1404);
    halves[1] = permute_bytes(word, 0u, 0x3424);
}
