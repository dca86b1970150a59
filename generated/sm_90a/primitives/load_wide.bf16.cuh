// Loads an aligned pair of elements of a buffer that the kernel does not write, in their compute type.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide(Wide (&dst)[2], const T* base, i64 i) {
  T pair[2];
  const T* from = base + i;
  static_assert(sizeof(T) == 2, "no other elements were expected");
  if constexpr (sizeof(T) == 2) {
    u32 bits;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    memcpy(pair, &bits, sizeof(pair));
  }
  widen_vec(pair, dst);
}
