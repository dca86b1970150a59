// Converts one element to the storage type and stores it.
template <typename T, typename From>
__device__ __forceinline__ void store_narrowed(T* base, i64 i, From value) {
    T narrowed;
    narrow(value, narrowed);
    store(base, i, narrowed);
}
