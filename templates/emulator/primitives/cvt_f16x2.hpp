inline u32 cvt_f16x2(float low, float high) {
  f16 first, second;
  narrow(low, first);
  narrow(high, second);
  return u32(first.bits) | u32(second.bits) << 16;
}
