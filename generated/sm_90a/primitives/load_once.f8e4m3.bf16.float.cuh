// Loads one element of a buffer that the kernel does not write, so that the compiler may merge loads and hoist them out
// of loops.
__device__ __forceinline__ f8e4m3 load_once(const f8e4m3* base, i64 i) {
  u16 bits;
  asm("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<f8e4m3>(static_cast<u8>(bits));
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
