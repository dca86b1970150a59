template <int PENDING>
inline void copy_async_wait() {}
