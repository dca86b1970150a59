//% macro access(width)
//% if width < 4
#pragma unroll
    for (i32 k = 0; k < N; ++k) dst[k] = load(base, i + k);
//% else
    const u32* from = reinterpret_cast<const u32*>(base + i);
    u32 words[bytes / 4];
#pragma unroll
//% if width == 16
    for (i32 w = 0; w < bytes / 4; w += 4) {
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3]) : "l"(from + w));
    }
//% elif width == 8
    for (i32 w = 0; w < bytes / 4; w += 2) {
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[w]), "=r"(words[w + 1]) : "l"(from + w));
    }
//% else
    for (i32 w = 0; w < bytes / 4; ++w) asm volatile("ld.global.b32 %0, [%1];" : "=r"(words[w]) : "l"(from + w));
//% endif
    memcpy(dst, words, bytes);
//% endif
//% endmacro
// Loads N consecutive elements from global memory, in aligned accesses of vector_width(N * sizeof(T)) bytes.
template <i32 N, typename T>
__device__ __forceinline__ void load_vec(T (&dst)[N], const T* base, i64 i) {
    constexpr i32 bytes = N * sizeof(T);
    constexpr i32 width = vector_width(bytes);
    static_assert(width == {{ load_widths | join(" || width == ") }}, "no other accesses were expected");
//% if load_widths | length == 1
{{ access(load_widths | first) -}}
//% else
//% for width in load_widths
    if constexpr (width == {{ width }}) {
{{ access(width) | indent(4, first=true) | replace("    #pragma", "#pragma") ~ "    }" }}
//% endfor
//% endif
}
