inline u32 cvt_bf16x2(float low, float high) {
  bf16 first, second;
  narrow(low, first);
  narrow(high, second);
  return u32(first.bits) | u32(second.bits) << 16;
}
