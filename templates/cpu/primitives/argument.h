// Returns an argument of a kernel: the entry point gets the address of all arguments, 8 bytes each.
template <typename T>
FG_INLINE T argument(const void* values, i32 position) {
    T value;
    __builtin_memcpy(&value, static_cast<const char*>(values) + 8 * position, sizeof value);
    return value;
}
