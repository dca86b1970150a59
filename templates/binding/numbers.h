// Python's arithmetic on numbers: 64-bit floats, and an error if Python raises one or an int does not fit 64 bits.
#pragma once

#include <stdexcept>

#include "overflow.h"

namespace {
namespace py {

[[noreturn]] inline void refuse() { throw std::domain_error("the kernel's scalars cannot be computed from the call's numbers"); }

template <class A, class B>
constexpr bool both_ints = std::is_integral_v<A> && std::is_integral_v<B>;

inline double sound(double result, std::initializer_list<double> given) {  // refuses infinity and NaN from finite numbers
  bool finite = true;
  for (double value : given) finite = finite && std::isfinite(value);
  if (finite && !std::isfinite(result)) refuse();
  return result;
}

template <class A, class B>
auto add(A a, B b) {
  if constexpr (both_ints<A, B>) {
    int64_t found;
    if (add_overflows(a, b, &found)) refuse();
    return found;
  } else {
    return double(a) + double(b);
  }
}
template <class A, class B>
auto sub(A a, B b) {
  if constexpr (both_ints<A, B>) {
    int64_t found;
    if (sub_overflows(a, b, &found)) refuse();
    return found;
  } else {
    return double(a) - double(b);
  }
}
template <class A, class B>
auto mul(A a, B b) {
  if constexpr (both_ints<A, B>) {
    int64_t found;
    if (mul_overflows(a, b, &found)) refuse();
    return found;
  } else {
    return double(a) * double(b);
  }
}
template <class A, class B>
double div(A a, B b) {
  if (b == B(0)) refuse();
  return double(a) / double(b);
}
template <class A, class B>
auto remainder(A a, B b) {
  if (b == B(0)) refuse();
  if constexpr (both_ints<A, B>) {
    const int64_t left = b == -1 ? 0 : int64_t(a) % int64_t(b);
    return left && (left < 0) != (b < 0) ? left + int64_t(b) : left;
  } else {
    const double left = std::fmod(double(a), double(b));
    return left != 0 ? ((left < 0) != (double(b) < 0) ? left + double(b) : left) : std::copysign(0.0, double(b));
  }
}
template <class A, class B>
auto floor_divide(A a, B b) {
  if (b == B(0)) refuse();
  if constexpr (both_ints<A, B>) {
    if (b == -1) return sub(int64_t(0), a);
    const int64_t quotient = int64_t(a) / int64_t(b), left = int64_t(a) % int64_t(b);
    return left && (left < 0) != (b < 0) ? quotient - 1 : quotient;
  } else {
    const double left = std::fmod(double(a), double(b));
    const double quotient = (double(a) - left) / double(b) - (left != 0 && (left < 0) != (double(b) < 0) ? 1.0 : 0.0);
    if (quotient == 0) return std::copysign(0.0, double(a) / double(b));
    const double floored = std::floor(quotient);
    return quotient - floored > 0.5 ? floored + 1 : floored;
  }
}
template <class A, class B>
auto pow(A a, B b) {
  if constexpr (both_ints<A, B>) {
    if (b < 0) refuse();  // Python returns a float
    int64_t found = 1, square = a;
    for (int64_t left = b; left; left >>= 1) {
      if (left & 1) found = mul(found, square);
      if (left > 1) square = mul(square, square);
    }
    return found;
  } else {
    const bool is_complex = a < A(0) && std::isfinite(double(a)) && double(b) != std::floor(double(b));
    if (is_complex || (a == A(0) && b < B(0))) refuse();
    return sound(std::pow(double(a), double(b)), {double(a), double(b)});
  }
}
template <class A>
auto neg(A a) {
  if constexpr (std::is_integral_v<A>) {
    return sub(int64_t(0), a);
  } else {
    return -a;
  }
}
template <class A>
auto abs(A a) {
  if constexpr (std::is_integral_v<A>) {
    return a < 0 ? neg(a) : int64_t(a);
  } else {
    return std::fabs(a);
  }
}
template <class A>
A copy(A a) {
  return a;
}
inline int64_t bitwise_left_shift(int64_t a, int64_t b) {
  if (b < 0 || (b > 62 && a)) refuse();
  return a ? mul(a, int64_t(1) << b) : 0;
}
template <class A, class B>
auto bitwise_and(A a, B b) {
  return std::conditional_t<std::is_same_v<A, bool> && std::is_same_v<B, bool>, bool, int64_t>(a & b);
}
template <class A, class B>
auto bitwise_or(A a, B b) {
  return std::conditional_t<std::is_same_v<A, bool> && std::is_same_v<B, bool>, bool, int64_t>(a | b);
}
template <class A, class B>
auto bitwise_xor(A a, B b) {
  return std::conditional_t<std::is_same_v<A, bool> && std::is_same_v<B, bool>, bool, int64_t>(a ^ b);
}
inline int64_t bitwise_right_shift(int64_t a, int64_t b) {
  if (b < 0) refuse();
  return a >> std::min<int64_t>(b, 63);
}
inline double applied(double (*function)(double), double a) {
  const double found = function(a);
  if ((std::isnan(found) && !std::isnan(a)) || (std::isinf(found) && std::isfinite(a))) refuse();
  return found;
}
inline double exp_below(double a, double b) { return a == b ? 1.0 : applied(std::exp, a - b); }

}  // namespace py
}  // namespace
