// Random bits, 16 per element, which load() and its variants return like memory. A generator without state computes
// them: Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
struct RandomBits { u32 low, high, stream; };  // the halves of the key, and the number of the draw within the key

__device__ __forceinline__ RandomBits random_bits(const i64* key, u32 stream) {
    const u64 bits = static_cast<u64>(load(key, 0));
    return {static_cast<u32>(bits), static_cast<u32>(bits >> 32), stream};
}

// Encrypts the counter (call, stream): four words, the bits of elements 8 * call to 8 * call + 7.
__device__ __forceinline__ void philox(u32* words, RandomBits key, u64 call) {
    constexpr i32 ROUNDS = 10;
    constexpr u32 MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;  // from the paper
    constexpr u32 WEYL_0 = 0x9E3779B9u, WEYL_1 = 0xBB67AE85u;  // from the paper; each round adds them to the key
    u32 c0 = static_cast<u32>(call), c1 = static_cast<u32>(call >> 32), c2 = key.stream, c3 = 0;
#pragma unroll
    for (i32 round = 0; round < ROUNDS; ++round) {
        const u32 left = c0, right = c2;
        c0 = __umulhi(right, MULTIPLIER_1) ^ c1 ^ (key.low + round * WEYL_0);
        c2 = __umulhi(left, MULTIPLIER_0) ^ c3 ^ (key.high + round * WEYL_1);
        c1 = right * MULTIPLIER_1;
        c3 = left * MULTIPLIER_0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Up to eight consecutive elements, the first a multiple of W: they may be bits of two calls.
template <i32 W, i32 N>
__device__ __forceinline__ void load_lanes(i16 (&dst)[N], RandomBits key, i64 i) {
    static_assert(N <= 8 && 8 % W == 0, "at most eight elements, in vectors that divide a call's");
    const u64 call = static_cast<u64>(i) >> 3;
    const i32 place = static_cast<i32>(i) & 7;  // within the call
    u32 words[8] = {};
    philox(words, key, call);
    if constexpr (W < N) {
        if (place + N > 8) philox(words + 4, key, call + 1);
    }
    // Shifts the first element's bits to the front, by 4, 2 and 1 elements.
    if constexpr (W < 8) {
#pragma unroll
        for (i32 w = 0; w + 2 < 8; ++w) words[w] = place & 4 ? words[w + 2] : words[w];
#pragma unroll
        for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 2 ? words[w + 1] : words[w];
    }
    if constexpr (W < 2) {
#pragma unroll
        for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 1 ? words[w] >> 16 | words[w + 1] << 16 : words[w];
    }
    memcpy(dst, words, sizeof(dst));
}

__device__ __forceinline__ i16 load(RandomBits key, i64 i) {
    i16 one[1];
    load_lanes<1>(one, key, i);
    return one[0];
}
