// Stores one element to global memory.
__device__ __forceinline__ void store(i64* base, i64 i, i64 value) {
    u64 bits = bit_cast<u64>(value);
    asm volatile("st.global.b64 [%0], %1;" :: "l"(base + i), "l"(bits) : "memory");
}
__device__ __forceinline__ void store(float* base, i64 i, float value) {
    u32 bits = bit_cast<u32>(value);
    asm volatile("st.global.b32 [%0], %1;" :: "l"(base + i), "r"(bits) : "memory");
}
