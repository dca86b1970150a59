// Rounds to the nearest f16 and back.
__device__ __forceinline__ float round_f16(float x) {
    f16 rounded;
    narrow(x, rounded);
    return widen(rounded);
}
