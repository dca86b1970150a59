// Compute type to storage type: floats round to nearest even, integers wrap.
// double to a float of 16 bits or fewer goes through float (two roundings), as torch does.
FG_INLINE void narrow(float x, bf16& out) { out.bits = float_to_bfloat(x); }
FG_INLINE void narrow(float x, f16& out) { out.bits = float_to_half(x); }
//% if "f8e4m3" in types
FG_INLINE void narrow(float x, f8e4m3& out) { out.bits = float_to_f8e4m3(x); }
//% endif
//% if "f8e5m2" in types
FG_INLINE void narrow(float x, f8e5m2& out) { out.bits = float_to_f8e5m2(x); }
//% endif
FG_INLINE void narrow(float x, float& out) { out = x; }
FG_INLINE void narrow(double x, bf16& out) { out.bits = float_to_bfloat((float)x); }
FG_INLINE void narrow(double x, f16& out) { out.bits = float_to_half((float)x); }
//% if "f8e4m3" in types
FG_INLINE void narrow(double x, f8e4m3& out) { out.bits = float_to_f8e4m3((float)x); }
//% endif
//% if "f8e5m2" in types
FG_INLINE void narrow(double x, f8e5m2& out) { out.bits = float_to_f8e5m2((float)x); }
//% endif
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
