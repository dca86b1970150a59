// Stores N consecutive elements to shared memory; small elements that fill aligned words are stored as words.
template <i32 N, typename T>
__device__ __forceinline__ void shared_store_vec(T* to, i32 i, const T (&src)[N]) {
    constexpr i32 bytes = N * sizeof(T);
    if constexpr (sizeof(T) < 4 && bytes % 4 == 0) {
        u32 words[bytes / 4];
        memcpy(words, src, bytes);
#pragma unroll
        for (i32 w = 0; w < bytes / 4; ++w) {
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared_address(to + i) + w * 4), "r"(words[w]) : "memory");
        }
    } else {
#pragma unroll
        for (i32 k = 0; k < N; ++k) shared_store(to, i + k, src[k]);
    }
}
