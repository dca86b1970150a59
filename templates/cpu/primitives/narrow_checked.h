// As narrow, to an element whose index was checked before; nothing is written once one was refused.
template <typename Wide, typename T>
FG_INLINE void narrow_checked(Wide x, T* base, i64 i, const char** failed) {
    if (none_failed(failed)) narrow(x, base[i]);
}
