// Random bits, 16 an element, indexed as if they lay in memory: Philox-4x32-10 of Salmon et al. (2011), a call for eight elements.
struct RandomBits {
    u32 low, high, stream;

    i16 operator[](i64 i) const {
        u32 c0 = (u32)((u64)i >> 3), c1 = (u32)((u64)i >> 35), c2 = stream, c3 = 0, first = low, second = high;
        for (int round = 0; round < 10; ++round) {
            const u64 left = (u64)c0 * 0xD2511F53u, right = (u64)c2 * 0xCD9E8D57u;
            c0 = (u32)(right >> 32) ^ c1 ^ first;
            c2 = (u32)(left >> 32) ^ c3 ^ second;
            c1 = (u32)right;
            c3 = (u32)left;
            first += 0x9E3779B9u;
            second += 0xBB67AE85u;
        }
        const u32 word = i & 4 ? (i & 2 ? c3 : c2) : (i & 2 ? c1 : c0);
        return (i16)(word >> (i & 1 ? 16 : 0));
    }
};

FG_INLINE RandomBits random_bits(const i64* key, u32 stream) {
    return {(u32)((u64)*key), (u32)((u64)*key >> 32), stream};
}
