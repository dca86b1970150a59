// Loads one element from global memory; not through the read-only cache, since outputs may alias inputs. Like all loads
// it is volatile, so that it stays behind a wait for the launch that writes the element.
//% for t in loaded
__device__ __forceinline__ {{ t.name }} load(const {{ t.name }}* base, i64 i) {
    {{ t.register }} bits;
    asm volatile("ld.global.{{ t.access }} %0, [%1];" : "={{ t.letter }}"(bits) : "l"(base + i));
    return bit_cast<{{ t.name }}>({{ t.bits }});
}
//% endfor
