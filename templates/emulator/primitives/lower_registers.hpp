template <i32 COUNT>
inline void lower_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "what setmaxnreg takes");
}
