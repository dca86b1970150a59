// Packs two 8-bit values into the lower half of a register, the first in the lowest byte. The bits are typed as a
// float, as `store_shared_words` takes them.
template <typename Byte>
__device__ __forceinline__ u32 pack_bytes(const Byte (&pair)[2]) {
    u32 bits = 0;
    memcpy(&bits, pair, sizeof(pair));
    return bits;
}
