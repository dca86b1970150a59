// load_wide() if a condition holds, else zeros without an access. The load is predicated, so that those of other
// operands do not wait for a branch.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide_if(bool wanted, Wide (&dst)[2], const T* base, i64 i) {
//% set sizes = loaded | map(attribute="size") | unique | sort
    static_assert(sizeof(T) == {{ sizes | join(" || sizeof(T) == ") }}, "no other elements were expected");
    const T* from = base + i;
    T pair[2];
//% if 8 in sizes
    if constexpr (sizeof(T) == 8) {
        u64 bits[2] = {0, 0};
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.b64 {%0, %1}, [%2]; }"
                     : "+l"(bits[0]), "+l"(bits[1]) : "l"(from), "r"(u32(wanted)));
        memcpy(pair, bits, sizeof(pair));
    }
//% endif
//% if 4 in sizes
    if constexpr (sizeof(T) == 4) {
        u32 bits[2] = {0, 0};
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.b32 {%0, %1}, [%2]; }"
                     : "+r"(bits[0]), "+r"(bits[1]) : "l"(from), "r"(u32(wanted)));
        memcpy(pair, bits, sizeof(pair));
    }
//% endif
//% if 2 in sizes
    if constexpr (sizeof(T) == 2) {
        u32 bits = 0;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.b32 %0, [%1]; }"
                     : "+r"(bits) : "l"(from), "r"(u32(wanted)));
        memcpy(pair, &bits, sizeof(pair));
    }
//% endif
//% if 1 in sizes
    if constexpr (sizeof(T) == 1) {
        u16 bits = 0;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.b16 %0, [%1]; }"
                     : "+h"(bits) : "l"(from), "r"(u32(wanted)));
        memcpy(pair, &bits, sizeof(pair));
    }
//% endif
    widen_vec(pair, dst);
}
