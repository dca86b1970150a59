// The index of a `sort_key` or `descending_key`.
FG_INLINE i64 key_index(i64 key) { return (key & 0xFFFFFFFFLL) >> 1; }
