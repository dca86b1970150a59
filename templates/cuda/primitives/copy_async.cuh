// Starts copying W elements (4, 8 or 16 bytes, aligned so) from global to shared memory; see copy_async_wait.
template <int W, typename T>
__device__ __forceinline__ void copy_async(T* to, i32 i, const T* base, i64 j) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to + i)), "l"(base + j), "n"(W * sizeof(T)));
}
