inline u32 shared_address(const void* pointer) { return static_cast<u32>(emulator::shared_offset(pointer)); }
