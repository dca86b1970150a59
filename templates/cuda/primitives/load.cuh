// One element from global memory. Never the read-only path: outputs may alias inputs.
template <typename T>
__device__ __forceinline__ T load(const T* base, i64 i) {
  const T* from = base + i;
  if constexpr (sizeof(T) == 8) {
    u64 bits;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 2) {
    u16 bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else {
    u16 bits;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(bits) : "l"(from));
    return bit_cast<T>(static_cast<u8>(bits));
  }
}
