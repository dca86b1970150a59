inline void widen_e4m3x2(u16 pair, float& low, float& high) {
  low = f8e4m3_to_float(static_cast<u8>(pair));
  high = f8e4m3_to_float(static_cast<u8>(pair >> 8));
}
