// Whether a level has a state where so many blocks were combined by pairs, as a binary digit is 1; the last one has all that is carried to it.
FG_INLINE bool is_held(i64 blocks, i32 level, i32 levels) {
    const i64 carried = blocks >> level;
    return level + 1 < levels ? (carried & 1) != 0 : carried != 0;
}
