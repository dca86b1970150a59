// Calls body(first, count) for the vectors of [begin, end): full ones with a constant count, so that their loops unroll, then the
// rest.
template <i32 LANES, typename Body>
FG_INLINE void each_chunk(i64 begin, i64 end, const Body& body) {
    i64 first = begin;
    for (; first + LANES <= end; first += LANES) body(first, LANES);
    if (first < end) body(first, static_cast<i32>(end - first));
}
