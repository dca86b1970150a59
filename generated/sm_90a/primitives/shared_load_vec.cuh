// Loads N consecutive elements from shared memory, aligned to their size (16 bytes at most).
template <i32 N, typename T>
__device__ __forceinline__ void shared_load_vec(T (&dst)[N], const T* from, i32 i) {
    constexpr i32 bytes = N * sizeof(T);
    if constexpr (bytes % 16 != 0) {
#pragma unroll
        for (i32 k = 0; k < N; ++k) dst[k] = shared_load(from, i + k);
    } else {
        u32 words[bytes / 4];
#pragma unroll
        for (i32 w = 0; w < bytes / 4; w += 4) {
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3])
                         : "r"(shared_address(from + i) + w * 4));
        }
        memcpy(dst, words, bytes);
    }
}
