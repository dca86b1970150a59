// Shared-memory address: the 32-bit form of a pointer to shared memory that PTX operands expect.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
