// Rounds to the nearest f8e4m3 and back.
__device__ __forceinline__ float round_f8e4m3(float x) {
    f8e4m3 rounded;
    narrow(x, rounded);
    return widen(rounded);
}
