// Arithmetic on int64_t that says whether the result overflows. The parts for MSVC are untested on it.
#pragma once

#include <cstdint>

namespace {
namespace py {

#ifdef _MSC_VER
inline bool add_overflows(int64_t a, int64_t b, int64_t* sum) {
  *sum = static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return (a < 0) == (b < 0) && (*sum < 0) != (a < 0);
}
inline bool sub_overflows(int64_t a, int64_t b, int64_t* difference) {
  *difference = static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  return (a < 0) != (b < 0) && (*difference < 0) != (a < 0);
}
inline bool mul_overflows(int64_t a, int64_t b, int64_t* product) {
  *product = static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  return (a == -1 && b == INT64_MIN) || (a && a != -1 && *product / a != b);
}
#else
inline bool add_overflows(int64_t a, int64_t b, int64_t* sum) { return __builtin_add_overflow(a, b, sum); }
inline bool sub_overflows(int64_t a, int64_t b, int64_t* difference) { return __builtin_sub_overflow(a, b, difference); }
inline bool mul_overflows(int64_t a, int64_t b, int64_t* product) { return __builtin_mul_overflow(a, b, product); }
#endif

}  // namespace py
}  // namespace
