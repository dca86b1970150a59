template <typename T>
inline T load_once(const T* base, i64 i) { return load(base, i); }
