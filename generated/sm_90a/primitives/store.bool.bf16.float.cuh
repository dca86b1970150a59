// Stores one element to global memory.
__device__ __forceinline__ void store(bool* base, i64 i, bool value) {
    u16 bits = bit_cast<u8>(value);
    asm volatile("st.global.u8 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(bf16* base, i64 i, bf16 value) {
    u16 bits = bit_cast<u16>(value);
    asm volatile("st.global.b16 [%0], %1;" :: "l"(base + i), "h"(bits) : "memory");
}
__device__ __forceinline__ void store(float* base, i64 i, float value) {
    u32 bits = bit_cast<u32>(value);
    asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
}
