// Loads an aligned pair of elements of a buffer that the kernel does not write, in their compute type. The compiler may
// merge such loads, but cannot move them before a wait for the launch that writes the buffer.
template <typename T, typename Wide>
__device__ __forceinline__ void load_wide(Wide (&dst)[2], const T* base, i64 i) {
    T pair[2];
    memcpy(pair, __builtin_assume_aligned(base + i, sizeof(pair)), sizeof(pair));
    widen_vec(pair, dst);
}
