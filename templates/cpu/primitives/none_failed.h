// Whether no index was refused up to now: what is refused has no place to be written to.
FG_INLINE bool none_failed(const char** failed) { return __atomic_load_n(failed, __ATOMIC_RELAXED) == nullptr; }
