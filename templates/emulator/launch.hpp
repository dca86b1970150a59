// The entry: arguments from the launch to the kernel's parameters, then the grid cluster by cluster.
namespace emulator {

inline i64 integer_argument(const Launch& launch, i32 i) {
  if (launch.arguments[i].is_real) fail("argument %d is a floating number; the kernel takes an integer or a pointer", i);
  return launch.arguments[i].integer;
}

inline double real_argument(const Launch& launch, i32 i) {
  if (!launch.arguments[i].is_real) fail("argument %d is an integer; the kernel takes a floating number", i);
  return launch.arguments[i].real;
}

template <typename T>
struct Parameter {
  static T take(const Launch& launch, i32 i) { return static_cast<T>(integer_argument(launch, i)); }
};
template <typename T>
struct Parameter<T*> {
  static T* take(const Launch& launch, i32 i) { return reinterpret_cast<T*>(integer_argument(launch, i)); }
};
template <>
struct Parameter<float> {
  static float take(const Launch& launch, i32 i) { return static_cast<float>(real_argument(launch, i)); }
};
template <>
struct Parameter<double> {
  static double take(const Launch& launch, i32 i) { return real_argument(launch, i); }
};

template <>
struct Parameter<TensorMap> {
  static TensorMap take(const Launch& launch, i32 i) { return *reinterpret_cast<const TensorMap*>(integer_argument(launch, i)); }
};

template <typename... P>
struct Call {
  Call(void (*kernel)(P...), P... values) { kernel(values...); }
};

template <typename... P>
inline void call(void (*kernel)(P...), const Launch& launch) {
  i32 count = sizeof...(P);
  if (launch.argument_count != count) fail("the launch passes %d arguments, the kernel takes %d", launch.argument_count, count);
  i32 next = 0;
  Call<P...>{kernel, Parameter<P>::take(launch, next++)...};  // braces: evaluated from left to right
}

// 0 when every block ran to its end; otherwise launch.message says what is wrong: 2 with an index of the user's, 1 with the kernel.
inline i32 run(const Launch& launch, void (*kernel)(const Launch&)) {
  Shape shape{static_cast<u32>(launch.block), static_cast<u32>(launch.block * launch.cluster)};
  Machine local{launch, kernel, shape, Stacks{launch.block * launch.cluster}};
  if (!local.stacks.usable()) {
    snprintf(launch.message, launch.message_bytes, "%s: no memory for the stacks of a cluster's threads", launch.kernel);
    return 1;
  }
  machine = &local;
  map_buffers();
  for (i32 b = 0; b < launch.grid && !local.failed; b += launch.cluster) run_cluster(b);
  machine = nullptr;
  return local.bad_index ? 2 : local.failed;
}

}  // namespace emulator
