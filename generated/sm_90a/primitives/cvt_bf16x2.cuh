// Rounds two floats to bf16 and packs them into one register, `low` in the lower half.
__device__ __forceinline__ u32 cvt_bf16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
