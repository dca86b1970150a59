// Rounds to the nearest f8e5m2 and back.
__device__ __forceinline__ float round_f8e5m2(float x) {
    f8e5m2 rounded;
    narrow(x, rounded);
    return widen(rounded);
}
