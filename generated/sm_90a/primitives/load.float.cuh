// Loads one element from global memory; not through the read-only cache, since outputs may alias inputs. Like all loads
// it is volatile, so that it stays behind a wait for the launch that writes the element.
__device__ __forceinline__ float load(const float* base, i64 i) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
    return bit_cast<float>(bits);
}
