// Copies one box from shared memory into a 2-d tensor; one thread issues, `tma_store_commit` and `tma_store_wait`
// follow. Coordinates run from the contiguous dimension outwards; elements outside of the tensor are not written.
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, const void* source, i32 x, i32 y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(x), "r"(y), "r"(shared_address(source))
                 : "memory");
}
