inline u32 sub_f16x2(u32 a, u32 b) {
  const float low = widen(bit_cast<f16>(static_cast<u16>(a))) - widen(bit_cast<f16>(static_cast<u16>(b)));
  const float high = widen(bit_cast<f16>(static_cast<u16>(a >> 16))) - widen(bit_cast<f16>(static_cast<u16>(b >> 16)));
  return cvt_f16x2(low, high);
}
