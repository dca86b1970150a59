inline void tma_prefetch_map(const TensorMap& map) {}
