// A number in the order of floats, NaN the greatest and -0 as 0, equal ones by their index below 2^31: the ordered bits of the value,
// its index, and whether it is -0.
__device__ __forceinline__ i64 sort_key(float x, i64 index) {
  const i32 bits = bit_cast<i32>(x);
  const i32 ordered = x != x ? 0x7f800001 : x == 0.0f ? 0 : bits < 0 ? bits ^ 0x7fffffff : bits;
  const i64 last = x == 0.0f && bits < 0;
  return static_cast<i64>(ordered) * 4294967296LL + index * 2 + last;
}
