// Loads one element from global memory, not through the read-only path: outputs may alias inputs. Like all loads it is
// volatile, so that it stays behind a wait for the launch that writes the element.
__device__ __forceinline__ bool load(const bool* base, i64 i) {
  u16 bits;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(base + i));
  return bit_cast<bool>(static_cast<u8>(bits));
}
__device__ __forceinline__ i64 load(const i64* base, i64 i) {
  u64 bits;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(base + i));
  return bit_cast<i64>(bits);
}
