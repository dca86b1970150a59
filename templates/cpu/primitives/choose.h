// Selects one of two indices.
FG_INLINE i64 choose(bool first, i64 index, i64 instead) {
    return first ? index : instead;
}
