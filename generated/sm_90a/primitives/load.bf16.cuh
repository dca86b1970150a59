// Loads one element from global memory; not through the read-only cache, since outputs may alias inputs. Like all loads
// it is volatile, so that it stays behind a wait for the launch that writes the element.
__device__ __forceinline__ bf16 load(const bf16* base, i64 i) {
    u16 bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
    return bit_cast<bf16>(bits);
}
