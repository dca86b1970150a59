// True if a level of the pairwise combination holds a state after `blocks` blocks: the binary digit is 1. The last level holds all
// carries.
FG_INLINE bool is_held(i64 blocks, i32 level, i32 levels) {
    const i64 carried = blocks >> level;
    return level + 1 < levels ? (carried & 1) != 0 : carried != 0;
}
