// Starts a cp.async of the first `count` of W elements (aligned to their size, 16 bytes at most) from global to shared
// memory, and fills the rest with zeros; see copy_async_wait. Fewer than 4 bytes are copied synchronously through a
// register.
template <i32 W, typename T>
__device__ __forceinline__ void copy_async_some(u32 to, const T* base, i64 j, i32 count) {
    constexpr i32 bytes = W * sizeof(T);
    const u32 present = static_cast<u32>(count) * sizeof(T);
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(base + j), "r"(present) : "memory");
    } else if constexpr (bytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(to), "l"(base + j), "n"(bytes), "r"(present)
                     : "memory");
    } else {
        static_assert(bytes == 2, "fewer than 4 bytes are one 16-bit element");
        u16 bits = 0;
        if (count > 0) asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + j));
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
    }
}
