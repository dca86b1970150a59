// Loads one element from global memory; not through the read-only cache, since outputs may alias inputs. Like all loads
// it is volatile, so that it stays behind a wait for the launch that writes the element.
__device__ __forceinline__ i64 load(const i64* base, i64 i) {
    u64 bits;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
    return bit_cast<i64>(bits);
}
