// Converts two signed bytes, each behind a byte 0x43, to bf16, exactly: 128 plus the lower seven bits, less 128 or 256.
// The sign bit is the last bit of the exponent.
__device__ __forceinline__ u32 bytes_to_bf16x2(u32 ends) { return sub_bf16x2(ends & 0x437f437fu, ends & 0x43804380u); }
