// True if no index was refused so far: a refused index has no element to write to.
FG_INLINE bool none_failed(const char** failed) { return __atomic_load_n(failed, __ATOMIC_RELAXED) == nullptr; }
