// Loads an aligned pair of elements of a buffer that the kernel does not write, in their compute type.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide(Wide (&dst)[2], const T* base, i64 i) {
  T pair[2];
  const T* from = base + i;
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4, "no other elements were expected");
  if constexpr (sizeof(T) == 4) {
    u32 bits[2];
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "l"(from));
    memcpy(pair, bits, sizeof(pair));
  }
  if constexpr (sizeof(T) == 2) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    memcpy(pair, &bits, sizeof(pair));
  }
  if constexpr (sizeof(T) == 1) {
    u16 bits;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(bits) : "l"(from));
    memcpy(pair, &bits, sizeof(pair));
  }
  widen_vec(pair, dst);
}
