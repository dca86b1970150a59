// a * b in 64 bits, wrapping as in torch; in C++ the overflow is undefined.
__device__ __forceinline__ i64 wrap_mul(i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b));
}
