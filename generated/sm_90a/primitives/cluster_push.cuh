// Stores a value asynchronously to the shared memory of block `rank` of the cluster, as element i of the array at the
// same address there. The mbarrier at the same address there counts its bytes; `mbarrier_wait_cluster` waits for them.
template <typename T>
__device__ __forceinline__ void cluster_push(T* array, i32 i, T value, i32 rank, u64* barrier) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "cluster_push sends 4 or 8 bytes");
    u32 there, barrier_there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(array + i)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(barrier)), "r"(rank));
    if constexpr (sizeof(T) == 8) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                     :: "r"(there), "l"(bit_cast<u64>(value)), "r"(barrier_there) : "memory");
    } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(there), "r"(bit_cast<u32>(value)), "r"(barrier_there) : "memory");
    }
}
