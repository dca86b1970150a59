// Takes registers from the block's pool, up to COUNT per thread (setmaxnreg); all warps of a warpgroup execute it.
template <i32 COUNT>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
