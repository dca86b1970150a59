// Loads one element from global memory; not through the read-only cache, since outputs may alias inputs. Like all loads
// it is volatile, so that it stays behind a wait for the launch that writes the element.
__device__ __forceinline__ f8e4m3 load(const f8e4m3* base, i64 i) {
    u16 bits;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(base + i));
    return bit_cast<f8e4m3>(static_cast<u8>(bits));
}
__device__ __forceinline__ bf16 load(const bf16* base, i64 i) {
    u16 bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
    return bit_cast<bf16>(bits);
}
__device__ __forceinline__ float load(const float* base, i64 i) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
    return bit_cast<float>(bits);
}
