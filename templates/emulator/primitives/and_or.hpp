inline u32 and_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }
