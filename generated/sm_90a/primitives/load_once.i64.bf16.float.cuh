// Loads one element of a buffer that the kernel does not write, so that the compiler may merge loads and hoist them out
// of loops.
__device__ __forceinline__ i64 load_once(const i64* base, i64 i) {
  u64 bits;
  asm("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
__device__ __forceinline__ bf16 load_once(const bf16* base, i64 i) {
  u16 bits;
  asm("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bf16>(bits);
}
__device__ __forceinline__ float load_once(const float* base, i64 i) {
  u32 bits;
  asm("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(base + i));
  return bit_cast<float>(bits);
}
