inline i32 opaque(i32 value) { return value; }
