// Transposes the 4x4 words that the four lanes of a quad hold: word i of lane t becomes word t of lane i.
template <typename Word>
__device__ __forceinline__ void quad_transpose(Word (&words)[4]) {
#pragma unroll
    for (i32 bit = 2; bit > 0; bit /= 2) {
        const bool upper = lane_id() & bit;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const Word received = shuffle_xor(upper ? words[i] : words[i | bit], bit);
            words[i] = upper ? received : words[i];
            words[i | bit] = upper ? words[i | bit] : received;
        }
    }
}
