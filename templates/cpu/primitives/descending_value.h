// The float of a `descending_key`.
FG_INLINE float descending_value(i64 key) { return sorted_value(key ^ ~0xFFFFFFFFLL); }
