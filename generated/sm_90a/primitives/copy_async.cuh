// Starts a cp.async of W elements (4, 8 or 16 bytes, aligned to their size) from global to shared memory; see
// copy_async_wait. Copies of 16 bytes bypass L1.
template <i32 W, typename T>
__device__ __forceinline__ void copy_async(T* to, i32 i, const T* base, i64 j) {
    if constexpr (W * sizeof(T) == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(base + j));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                     ::"r"(shared_address(to + i)), "l"(base + j), "n"(W * sizeof(T)));
    }
}
