// Sizes: quotients and remainders of what is not negative; whatever is divided by 0 is 0.

inline int64_t quotient(int64_t value, int64_t divisor) { return divisor ? value / divisor : 0; }
inline int64_t remainder(int64_t value, int64_t divisor) { return divisor ? value % divisor : 0; }
inline int64_t least(int64_t one, int64_t other) { return std::min(one, other); }

// What 64 bits cannot hold becomes the least number, as a processor's conversion gives it.
inline int64_t integer(double value) {
  return value >= -9223372036854775808.0 && value < 9223372036854775808.0 ? static_cast<int64_t>(value) : INT64_MIN;
}
inline int64_t integer(int64_t value) { return value; }
