// Reinterprets the bits as another type of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}
