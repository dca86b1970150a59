// Rounds to the nearest bf16 and back.
__device__ __forceinline__ float round_bf16(float x) {
    bf16 rounded;
    narrow(x, rounded);
    return widen(rounded);
}
