// The value of a kernel's argument: an entry gets an array of pointers to the values.
template <typename T>
FG_INLINE T argument(void* const* arguments, i32 position) {
    return *static_cast<const T*>(arguments[position]);
}
