// Requests `bytes` of a buffer, a multiple of 16, for the L2 cache.
template <typename T>
__device__ __forceinline__ void prefetch_l2(const T* base, i64 i, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(base + i), "r"(bytes));
}
