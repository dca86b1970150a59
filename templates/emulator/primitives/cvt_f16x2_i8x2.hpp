inline u32 cvt_f16x2_i8x2(u16 pair) {
  return cvt_f16x2(static_cast<float>(static_cast<i8>(pair)), static_cast<float>(static_cast<i8>(pair >> 8)));
}
