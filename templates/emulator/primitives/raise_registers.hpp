template <i32 COUNT>
inline void raise_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "what setmaxnreg takes");
}
