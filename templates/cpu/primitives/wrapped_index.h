// As checked_index; a negative index counts from the end.
FG_INLINE i64 wrapped_index(i64 index, i64 extent, const char* message, const char** failed) {
    return checked_index(index < 0 ? index + extent : index, extent, message, failed);
}
