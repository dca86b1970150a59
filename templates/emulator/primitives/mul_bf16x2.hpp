inline u32 mul_bf16x2(u32 a, u32 b) {
  const float low = widen(bit_cast<bf16>(static_cast<u16>(a))) * widen(bit_cast<bf16>(static_cast<u16>(b)));
  const float high = widen(bit_cast<bf16>(static_cast<u16>(a >> 16))) * widen(bit_cast<bf16>(static_cast<u16>(b >> 16)));
  return cvt_bf16x2(low, high);
}
