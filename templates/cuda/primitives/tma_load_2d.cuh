// Copies one box of a 2-d tensor into shared memory; one thread issues, and the mbarrier counts the bytes. Coordinates
// run from the contiguous dim outwards; elements outside of the tensor arrive as zeros and count too.
__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap& map, u64* barrier, i32 x, i32 y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];"
        ::"r"(shared_address(destination)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
}
