inline void wgmma_fence() { emulator::fence_products(); }
