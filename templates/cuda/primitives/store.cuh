// One element to global memory.
template <typename T>
__device__ __forceinline__ void store(T* base, i64 i, T value) {
  T* to = base + i;
  if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.b64 [%0], %1;" :: "l"(to), "l"(bit_cast<u64>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.b32 [%0], %1;" :: "l"(to), "r"(bit_cast<u32>(value)) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.b16 [%0], %1;" :: "l"(to), "h"(bit_cast<u16>(value)) : "memory");
  } else {
    u16 bits = bit_cast<u8>(value);
    asm volatile("st.global.u8 [%0], %1;" :: "l"(to), "h"(bits) : "memory");
  }
}
