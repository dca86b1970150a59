inline u32 cvt_f16x2_f8e4m3x2(u16 pair) {
  return cvt_f16x2(f8e4m3_to_float(static_cast<u8>(pair)), f8e4m3_to_float(static_cast<u8>(pair >> 8)));
}
