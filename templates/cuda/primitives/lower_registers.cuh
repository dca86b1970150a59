// Releases registers to the block's pool, down to COUNT per thread (setmaxnreg); all warps of a warpgroup execute it.
template <i32 COUNT>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
