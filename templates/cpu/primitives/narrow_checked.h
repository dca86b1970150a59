// As narrow, for an element with a checked index; writes nothing once an index was refused.
template <typename Wide, typename T>
FG_INLINE void narrow_checked(Wide x, T* base, i64 i, const char** failed) {
    if (none_failed(failed)) narrow(x, base[i]);
}
