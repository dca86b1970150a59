// Stores N consecutive elements to global memory, in aligned accesses of vector_width(N * sizeof(T)) bytes.
template <i32 N, typename T>
__device__ __forceinline__ void store_vec(T* base, i64 i, const T (&src)[N]) {
    constexpr i32 bytes = N * sizeof(T);
    constexpr i32 width = vector_width(bytes);
    static_assert(width == 4, "no other accesses were expected");
    u32* to = reinterpret_cast<u32*>(base + i);
    u32 words[bytes / 4];
    memcpy(words, src, bytes);
#pragma unroll
    for (i32 w = 0; w < bytes / 4; ++w) {
        asm volatile("st.global.b32 [%0], %1;" :: "l"(to + w), "r"(words[w]) : "memory");
    }
}
