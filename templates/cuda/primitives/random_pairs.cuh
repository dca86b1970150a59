// The random bits of pairs of neighboring elements: a lane draws eight elements, from a multiple of eight on, and the
// lanes of a quad exchange pairs. pairs[i] is pair t of what lane i has drawn, in lane t. All 32 lanes take part.
__device__ __forceinline__ void random_pairs(u32 (&pairs)[4], const i64* key, u32 stream, i64 i) {
    philox(pairs, random_bits(key, stream), static_cast<u64>(i) >> 3);
    quad_transpose(pairs);
}
