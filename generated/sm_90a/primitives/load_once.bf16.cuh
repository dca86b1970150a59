// One element of a buffer that the kernel does not write: loads of one address may become one, and may leave a loop.
__device__ __forceinline__ bf16 load_once(const bf16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}
