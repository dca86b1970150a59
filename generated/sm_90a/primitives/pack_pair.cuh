// Packs two 16-bit values into one register, the first in the lower half. The bits are typed as a float, as
// `store_shared_words` takes them.
template <typename Half>
__device__ __forceinline__ u32 pack_pair(const Half (&pair)[2]) {
    return u32(pair[0].bits) | u32(pair[1].bits) << 16;
}
