// Loads N consecutive elements from global memory, in aligned accesses of vector_width(N * sizeof(T)) bytes.
template <i32 N, typename T>
__device__ __forceinline__ void load_vec(T (&dst)[N], const T* base, i64 i) {
    constexpr i32 bytes = N * sizeof(T);
    constexpr i32 width = vector_width(bytes);
    static_assert(width == 16, "no other accesses were expected");
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
    for (i32 w = 0; w < bytes / 4; w += 4) {
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3]) : "l"(from + w));
    }
    memcpy(dst, words, bytes);
}
