// An index that was read, if it is in [0, extent); else the first element's, and the message goes where the caller sees it.
FG_INLINE i64 checked_index(i64 index, i64 extent, const char* message, const char** failed) {
    if (index >= 0 && index < extent) return index;
    __atomic_store_n(failed, message, __ATOMIC_RELAXED);
    return 0;
}
