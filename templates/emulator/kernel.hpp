// Compiled with each kernel: templates over its types, and the call of a launch.

// Called by the compiler for an index outside of an array of known size, such as a thread's registers.
extern "C" void __ubsan_handle_out_of_bounds(void*, void* index) {
  emulator::fail("out of bounds: index %lld of an array of the thread's own", static_cast<i64>(reinterpret_cast<u64>(index)));
}

namespace emulator {

// An address in a block's shared memory. In CUDA this is a plain pointer, so emitted text declares it `auto` or `SharedArray`.
template <typename T>
struct SharedArray {
  i64 offset;
  T& operator*() const { return *reinterpret_cast<T*>(shared_memory() + offset); }  // only its address is taken
  SharedArray operator+(i64 elements) const { return {offset + elements * static_cast<i64>(sizeof(T))}; }
};

inline void multiply(bf16, const Product& product) { multiply_bf16(product); }
inline void multiply(f16, const Product& product) { multiply_f16(product); }

template <int TRANSPOSE_A, int TRANSPOSE_B, typename Element, int COUNT>
inline void wgmma(float (&d)[COUNT], u64 a, u64 b, i32 accumulate) {
  Product product{d, COUNT, a, {}, b, accumulate != 0, TRANSPOSE_A != 0, TRANSPOSE_B != 0, false};
  product.run = [](const Product& each) { multiply(Element{}, each); };
  start_product(product);
}

template <int TRANSPOSE_B, typename Element, int COUNT>
inline void wgmma_rs(float (&d)[COUNT], const u32 (&a)[4], u64 b, i32 accumulate) {
  Product product{d, COUNT, 0, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, false, TRANSPOSE_B != 0, true};
  product.run = [](const Product& each) { multiply(Element{}, each); };
  start_product(product);
}

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

}  // namespace emulator
