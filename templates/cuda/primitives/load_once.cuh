// Loads one element of a buffer that the kernel does not write, so that the compiler may merge loads and hoist them out
// of loops.
//% for t in stored
__device__ __forceinline__ {{ t.name }} load_once(const {{ t.name }}* base, i64 i) {
  {{ t.register }} bits;
  asm("ld.global.{{ t.access }} %0, [%1];" : "={{ t.letter }}"(bits) : "l"(base + i));
  return bit_cast<{{ t.name }}>({{ t.bits }});
}
//% endfor
