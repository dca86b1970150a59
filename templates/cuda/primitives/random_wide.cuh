// load_wide() of random bits: an aligned pair of elements.
__device__ __forceinline__ void random_wide(i64 (&dst)[2], RandomBits key, i64 i) {
    i16 pair[2];
    load_lanes<2>(pair, key, i);
    dst[0] = pair[0];
    dst[1] = pair[1];
}
