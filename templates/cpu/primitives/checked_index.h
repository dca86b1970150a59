// Returns an index that was loaded; outside of [0, extent), returns 0 and reports the message to the caller.
FG_INLINE i64 checked_index(i64 index, i64 extent, const char* message, const char** failed) {
    if (index >= 0 && index < extent) return index;
    __atomic_store_n(failed, message, __ATOMIC_RELAXED);
    return 0;
}
