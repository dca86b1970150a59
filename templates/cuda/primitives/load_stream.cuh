// Loads 16 bytes of a buffer that the kernel does not write and reads once: they displace nothing from the L1 cache,
// and the L2 cache fetches the 256 bytes around them.
template <typename T>
__device__ __forceinline__ void load_stream(u32 (&dst)[4], const T* base, i64 i) {
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(dst[0]), "=r"(dst[1]), "=r"(dst[2]), "=r"(dst[3]) : "l"(base + i));
}
