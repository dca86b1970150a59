// Converts two packed f8e5m2, the upper bytes of f16, to packed f16.
__device__ __forceinline__ u32 cvt_f16x2_f8e5m2x2(u16 pair) { return permute_bytes(pair, 0x1404); }
