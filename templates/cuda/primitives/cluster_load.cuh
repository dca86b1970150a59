// Element i of the array at the same address in the shared memory of block `rank` of the cluster.
template <typename T>
__device__ __forceinline__ T cluster_load(const T* array, i32 i, i32 rank) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "cluster_load reads 4 or 8 bytes");
    u32 here = static_cast<u32>(__cvta_generic_to_shared(array + i));
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    if constexpr (sizeof(T) == 8) {
        u64 bits;
        asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(bits) : "r"(there) : "memory");
        return bit_cast<T>(bits);
    } else {
        u32 bits;
        asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(bits) : "r"(there) : "memory");
        return bit_cast<T>(bits);
    }
}
