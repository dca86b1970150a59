// Any NaN becomes 0x7fff, as with cvt.
inline void narrow(float value, bf16& out) {
  u32 bits = __float_as_uint(value);
  bits += 0x7fffu + (bits >> 16 & 1u);  // half a unit, ties to even
  out.bits = value != value ? 0x7fffu : static_cast<u16>(bits >> 16);
}
inline u32 f16_magnitude(float x) {
  if (x != x) return 0x7fffu;
  if (x >= 65536.0f) return 0x7c00u;
  if (x < 0x1p-14f) return __float_as_uint(x + 0.5f) - __float_as_uint(0.5f);  // 0.5 has f16's subnormal unit
  u32 bits = __float_as_uint(x) - (112u << 23);
  return (bits + 0xfffu + (bits >> 13 & 1u)) >> 13;
}
inline void narrow(float value, f16& out) {
  u32 sign = value == value ? __float_as_uint(value) >> 16 & 0x8000u : 0u;
  out.bits = static_cast<u16>(sign | f16_magnitude(fabsf(value)));
}
inline void narrow(float value, f8e4m3& out) { out.bits = float_to_f8e4m3(value); }
inline void narrow(float value, f8e5m2& out) { out.bits = float_to_f8e5m2(value); }
inline void narrow(float value, float& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }
inline void narrow(double value, float& out) { out = static_cast<float>(value); }
inline void narrow(double value, bf16& out) { narrow(static_cast<float>(value), out); }
inline void narrow(double value, f16& out) { narrow(static_cast<float>(value), out); }
inline void narrow(double value, f8e4m3& out) { narrow(static_cast<float>(value), out); }
inline void narrow(double value, f8e5m2& out) { narrow(static_cast<float>(value), out); }
inline void narrow(i64 value, i8& out) { out = static_cast<i8>(value); }
inline void narrow(i64 value, u8& out) { out = static_cast<u8>(value); }
inline void narrow(i64 value, i16& out) { out = static_cast<i16>(value); }
inline void narrow(i64 value, i32& out) { out = static_cast<i32>(value); }
inline void narrow(i64 value, i64& out) { out = value; }
inline void narrow(bool value, bool& out) { out = value; }
