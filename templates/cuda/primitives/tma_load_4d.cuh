// Copies one box of a 4-d tensor into shared memory; one thread issues, and the mbarrier counts the bytes. Coordinates
// run from the contiguous dim outwards; elements outside of the tensor arrive as zeros and count too.
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap& map, u64* barrier, i32 x, i32 y,
                                            i32 z, i32 w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        ::"r"(shared_address(destination)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
        : "memory");
}
