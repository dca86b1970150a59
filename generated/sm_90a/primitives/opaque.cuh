// The value itself, but the compiler no longer knows where it comes from: what depends on it is not hoisted out of a
// loop, where it would hold registers.
__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
