template <typename T>
using SharedArray = T*;

// The part of the block's dynamic shared memory that starts at `byte_offset`, as an array of T.
template <typename T>
__device__ __forceinline__ SharedArray<T> shared_array(u32 byte_offset) {
    extern __shared__ __align__(1024) u8 dynamic_shared_memory[];
    return reinterpret_cast<T*>(dynamic_shared_memory + byte_offset);
}
