inline float maximum(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7fffffffu);
  if (a == b) return signbit(a) ? b : a;  // the GPU orders -0 before 0
  return a > b ? a : b;
}
inline double maximum(double a, double b) { return a > b || a != a ? a : b; }
inline i64 maximum(i64 a, i64 b) { return a > b ? a : b; }
