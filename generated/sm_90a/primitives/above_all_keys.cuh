// Greater than every `sort_key`: the key of a place without an element.
__device__ __forceinline__ i64 above_all_keys() { return 0x7f800002LL << 32; }
