inline void copy_async_commit() {}
