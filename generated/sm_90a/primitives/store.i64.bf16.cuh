// Stores one element to global memory.
__device__ __forceinline__ void store(i64* base, i64 i, i64 value) {
    u64 bits = bit_cast<u64>(value);
    asm volatile("st.global.b64 [%0], %1;" :: "l"(base + i), "l"(bits) : "memory");
}
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
    u16 bits = bit_cast<u16>(value);
    asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
