// Random bits, 16 per element, which load() and its variants return like memory: Philox-4x32-10 of Salmon et al.
// (2011).
struct RandomBits { u32 low, high, stream; };

__device__ __forceinline__ RandomBits random_bits(const i64* key, u32 stream) {
  const u64 bits = static_cast<u64>(load(key, 0));
  return {static_cast<u32>(bits), static_cast<u32>(bits >> 32), stream};
}

// The bits of elements 8 * call to 8 * call + 7.
__device__ __forceinline__ void philox(u32* words, RandomBits key, u64 call) {
  u32 c0 = static_cast<u32>(call), c1 = static_cast<u32>(call >> 32), c2 = key.stream, c3 = 0;
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    const u32 left = c0, right = c2;
    c0 = __umulhi(right, 0xCD9E8D57u) ^ c1 ^ (key.low + round * 0x9E3779B9u);
    c2 = __umulhi(left, 0xD2511F53u) ^ c3 ^ (key.high + round * 0xBB67AE85u);
    c1 = right * 0xCD9E8D57u;
    c3 = left * 0xD2511F53u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Up to eight consecutive elements, in aligned runs of W.
template <int W, int N>
__device__ __forceinline__ void load_lanes(i16 (&dst)[N], RandomBits key, i64 i) {
  static_assert(N <= 8 && 8 % W == 0, "");
  const i32 place = static_cast<i32>(i) & 7;
  u32 words[8] = {};
  philox(words, key, static_cast<u64>(i) >> 3);
  if constexpr (W < N) {
    if (place + N > 8) philox(words + 4, key, (static_cast<u64>(i) >> 3) + 1);
  }
  if constexpr (W < 8) {  // shifts the first element's bits to the front
#pragma unroll
    for (i32 w = 0; w + 2 < 8; ++w) words[w] = place & 4 ? words[w + 2] : words[w];
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 2 ? words[w + 1] : words[w];
  }
  if constexpr (W < 2) {
#pragma unroll
    for (i32 w = 0; w + 1 < 8; ++w) words[w] = place & 1 ? words[w] >> 16 | words[w + 1] << 16 : words[w];
  }
  memcpy(dst, words, sizeof(dst));
}

__device__ __forceinline__ i16 load(RandomBits key, i64 i) {
  i16 one[1];
  load_lanes<1>(one, key, i);
  return one[0];
}
