// Storage type to compute type: floats of 16 bits or fewer to float, integers to i64.
// A bool is read as a byte: g++ 12 does not vectorize loops that load a bool.
FG_INLINE float widen(bf16 x) { return float_from_bits((u32)x.bits << 16); }
FG_INLINE float widen(f16 x) { return half_to_float(x.bits); }
//% if "f8e4m3" in types
FG_INLINE float widen(f8e4m3 x) { return f8e4m3_to_float(x.bits); }
//% endif
//% if "f8e5m2" in types
FG_INLINE float widen(f8e5m2 x) { return f8e5m2_to_float(x.bits); }
//% endif
FG_INLINE float widen(float x) { return x; }
FG_INLINE double widen(double x) { return x; }
FG_INLINE bool widen(const bool& x) {
    u8 byte;
    __builtin_memcpy(&byte, &x, sizeof byte);
    return byte != 0;
}
FG_INLINE i64 widen(i8 x) { return x; }
FG_INLINE i64 widen(u8 x) { return x; }
FG_INLINE i64 widen(i16 x) { return x; }
FG_INLINE i64 widen(u16 x) { return x; }
FG_INLINE i64 widen(i32 x) { return x; }
FG_INLINE i64 widen(u32 x) { return x; }
FG_INLINE i64 widen(i64 x) { return x; }
FG_INLINE i64 widen(u64 x) { return (i64)x; }
