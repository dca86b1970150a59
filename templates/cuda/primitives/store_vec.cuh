//% macro access(width)
//% if width < 4
#pragma unroll
    for (i32 k = 0; k < N; ++k) store(base, i + k, src[k]);
//% else
    u32* to = reinterpret_cast<u32*>(base + i);
    u32 words[bytes / 4];
    memcpy(words, src, bytes);
#pragma unroll
//% if width == 16
    for (i32 w = 0; w < bytes / 4; w += 4) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "l"(to + w), "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3])
                     : "memory");
    }
//% elif width == 8
    for (i32 w = 0; w < bytes / 4; w += 2) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};"
                     :: "l"(to + w), "r"(words[w]), "r"(words[w + 1]) : "memory");
    }
//% else
    for (i32 w = 0; w < bytes / 4; ++w) {
        asm volatile("st.global.b32 [%0], %1;" :: "l"(to + w), "r"(words[w]) : "memory");
    }
//% endif
//% endif
//% endmacro
// Stores N consecutive elements to global memory, in aligned accesses of vector_width(N * sizeof(T)) bytes.
template <i32 N, typename T>
__device__ __forceinline__ void store_vec(T* base, i64 i, const T (&src)[N]) {
    constexpr i32 bytes = N * sizeof(T);
    constexpr i32 width = vector_width(bytes);
    static_assert(width == {{ store_widths | join(" || width == ") }}, "no other accesses were expected");
//% if store_widths | length == 1
{{ access(store_widths | first) -}}
//% else
//% for width in store_widths
    if constexpr (width == {{ width }}) {
{{ access(width) | indent(4, first=true) | replace("    #pragma", "#pragma") ~ "    }" }}
//% endfor
//% endif
}
