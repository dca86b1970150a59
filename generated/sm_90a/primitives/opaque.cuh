// Returns the value, but hides its origin from the compiler, so that expressions of it are not hoisted out of a loop
// into registers.
__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
