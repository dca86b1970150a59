inline float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
inline float widen(f16 x) {
  u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, fraction = x.bits & 1023u;
  float magnitude = exponent == 31 ? __uint_as_float(0x7f800000u | fraction << 13)
                  : exponent == 0  ? static_cast<float>(fraction) * 0x1p-24f
                                   : __uint_as_float((exponent + 112u) << 23 | fraction << 13);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
inline float widen(f8e4m3 x) { return f8e4m3_to_float(x.bits); }
inline float widen(f8e5m2 x) { return widen(f16{static_cast<u16>(x.bits << 8)}); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline i64 widen(i8 x) { return x; }
inline i64 widen(u8 x) { return x; }
inline i64 widen(i16 x) { return x; }
inline i64 widen(i32 x) { return x; }
inline i64 widen(i64 x) { return x; }
inline bool widen(bool x) { return x; }
