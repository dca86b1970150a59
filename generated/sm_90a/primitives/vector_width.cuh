// Bytes per access to a vector of `bytes` bytes: the largest power of two that divides it, at most 16. load_vec and
// store_vec require this alignment.
__device__ __forceinline__ constexpr i32 vector_width(i32 bytes) {
    return bytes % 16 == 0 ? 16 : bytes & -bytes;
}
