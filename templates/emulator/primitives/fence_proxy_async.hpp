inline void fence_proxy_async() { emulator::fence_words(); }
