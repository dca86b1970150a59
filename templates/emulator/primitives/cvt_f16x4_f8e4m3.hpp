inline void cvt_f16x4_f8e4m3(u32 (&halves)[2], u32 word) {
  float values[4];
  for (i32 i = 0; i < 4; ++i) values[i] = f8e4m3_to_float(static_cast<u8>(word >> 8 * i));
  for (i32 i = 0; i < 2; ++i) halves[i] = cvt_f16x2(values[2 * i], values[2 * i + 1]);
}
