// Arithmetic on sizes, which are not negative; division by 0 gives 0.

inline int64_t quotient(int64_t value, int64_t divisor) { return divisor ? value / divisor : 0; }
inline int64_t remainder(int64_t value, int64_t divisor) { return divisor ? value % divisor : 0; }
inline int64_t least(int64_t one, int64_t other) { return std::min(one, other); }

// Out of range gives -2^63, like x86 conversions.
inline int64_t integer(double value) {
  return value >= -9223372036854775808.0 && value < 9223372036854775808.0 ? static_cast<int64_t>(value) : INT64_MIN;
}
inline int64_t integer(int64_t value) { return value; }
