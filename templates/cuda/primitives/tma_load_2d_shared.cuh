// As `tma_load_2d`, into the shared memory of all blocks of the cluster whose bits are set in `blocks`, at the same address; in each of
// them, the mbarrier at the same address counts the bytes.
__device__ __forceinline__ void tma_load_2d_shared(void* destination, const TensorMap& map, u64* barrier, i32 x, i32 y, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(destination)),
        "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}
