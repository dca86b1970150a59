// Computed value to the element that is stored: floats to nearest even, integers wrap.
// double to a 16-bit float goes through float (two roundings), as torch does.
FG_INLINE void narrow(float x, bf16& out) { out.bits = float_to_bfloat(x); }
FG_INLINE void narrow(float x, f16& out) { out.bits = float_to_half(x); }
FG_INLINE void narrow(float x, float& out) { out = x; }
FG_INLINE void narrow(double x, bf16& out) { out.bits = float_to_bfloat((float)x); }
FG_INLINE void narrow(double x, f16& out) { out.bits = float_to_half((float)x); }
FG_INLINE void narrow(double x, float& out) { out = (float)x; }
FG_INLINE void narrow(double x, double& out) { out = x; }
FG_INLINE void narrow(bool x, bool& out) { out = x; }
FG_INLINE void narrow(i64 x, i8& out) { out = (i8)x; }
FG_INLINE void narrow(i64 x, u8& out) { out = (u8)x; }
FG_INLINE void narrow(i64 x, i16& out) { out = (i16)x; }
FG_INLINE void narrow(i64 x, u16& out) { out = (u16)x; }
FG_INLINE void narrow(i64 x, i32& out) { out = (i32)x; }
FG_INLINE void narrow(i64 x, u32& out) { out = (u32)x; }
FG_INLINE void narrow(i64 x, i64& out) { out = x; }
FG_INLINE void narrow(i64 x, u64& out) { out = (u64)x; }
