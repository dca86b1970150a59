// Stores one element to global memory.
__device__ __forceinline__ void store(bool* base, i64 i, bool value) {
    u16 bits = bit_cast<u8>(value);
    asm volatile("st.global.u8 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(i64* base, i64 i, i64 value) {
    u64 bits = bit_cast<u64>(value);
    asm volatile("st.global.b64 [%0], %1;" :: "l"(base + i), "l"(bits) : "memory");
}
