// Operators with several programs: a call runs the first program whose guards hold.
#pragma once

#include <ATen/ops/ceil.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/logical_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/round.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/trunc.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {
namespace py {

// Operations that Python lacks are computed by torch, as for kernels launched from Python.
inline at::Tensor tensor_of(double value) { return at::full({}, value, at::kDouble); }
inline at::Tensor tensor_of(int64_t value) { return at::full({}, value, at::kLong); }
inline at::Tensor tensor_of(bool value) { return at::full({}, value, at::kBool); }
template <class Function, class... A>
auto by_torch(Function function, A... given) {
  using Found = std::conditional_t<(std::is_integral_v<A> && ...), int64_t, double>;
  const at::Tensor found = function(tensor_of(given)...);
  return found.is_floating_point() ? Found(found.item<double>()) : Found(found.item<int64_t>());
}

}  // namespace py

namespace fg {

inline c10::SymInt quotient(const c10::SymInt& value, const c10::SymInt& divisor) { return value / divisor; }
inline c10::SymInt remainder(const c10::SymInt& value, const c10::SymInt& divisor) { return value % divisor; }
inline c10::SymInt least(const c10::SymInt& one, const c10::SymInt& other) { return one.min(other); }

inline at::Tensor stand_in(std::vector<c10::SymInt> shape, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty_symint(shape, like.options().dtype(dtype));
}

using Ints = at::ArrayRef<int64_t>;
using Words = at::ArrayRef<Word>;

struct Program {
  int kind;        // of a call: its dtypes, ranks and constants
  int capability;  // compute capability, such as 90; 0 for the CPU
  bool (*run)(const Tensors&, Ints, Words, Tensors&);
};

// Uses strings only: printing a number to a stream crashes if the compiler statically links its own libstdc++ beside torch's.
inline std::string listed(at::IntArrayRef numbers) {
  std::string text;
  for (int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

inline std::string described(const Tensors& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += (text.empty() ? "" : ", ") + std::string(c10::toString(tensor.scalar_type())) + listed(tensor.sizes());
    if (!tensor.is_contiguous()) text += " with strides " + listed(tensor.strides());
  }
  return text;
}

[[noreturn]] inline void refuse(const char* name, const Tensors& tensors, const char* built, Ints sizes = {},
                                at::ArrayRef<size_t> written = {}) {
  const bool is_strided = std::any_of(written.begin(), written.end(), [&](size_t n) { return !tensors[n].is_contiguous(); });
  const bool is_small = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 1; });
  TORCH_CHECK_TYPE(false, name, " was not built for ", described(tensors), sizes.empty() ? "" : " with the sizes " + listed(sizes),
                   " on ", tensors[0].device().str(), "; it was built for ", built,
                   is_small ? ", and for sizes of 1 and more" : "", "\n  try: ",
                   is_strided ? "pass a contiguous tensor for each written argument: these are not copied"
                              : "build it for this call too: fusegen build, with the same --format");
}

// Runs a call. If no program accepts the layouts of the tensors, those that are not written to are copied.
inline Tensors run(const char* name, at::ArrayRef<Program> programs, int kind, Tensors tensors, Ints sizes, Words numbers,
                   at::ArrayRef<size_t> written, const char* built) {
  const at::Device device = tensors[0].device();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_TYPE(tensor.device() == device, name, ": tensors are on ", device.str(), " and on ", tensor.device().str(),
                     "\n  try: move them to one device");
  }
  TORCH_CHECK(device.is_cuda() || refusal().empty(), name, ": ", refusal());
  const int wanted = device.is_cuda() ? capability(device.index()) : 0;
  Tensors out;
  for (bool is_copied : {false, true}) {
    for (const Program& program : programs) {
      if (program.kind == kind && program.capability == wanted && program.run(tensors, sizes, numbers, out)) return out;
    }
    for (size_t place = 0; !is_copied && place < tensors.size(); ++place) {
      at::Tensor& tensor = tensors[place];
      if (std::find(written.begin(), written.end(), place) != written.end()) continue;
      if (!tensor.is_contiguous()) {
        tensor = tensor.contiguous();
      } else if (!lies_at(tensor, 16, {})) {
        tensor = tensor.clone();
      }
    }
  }
  refuse(name, tensors, built, sizes, written);
}

inline bool needs_gradient(at::ArrayRef<at::Tensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

// Rejects None, and forward mode: a result without a tangent would silently have a derivative of zero.
inline void check_tangents(const char* name, const Tensors& tensors) {
  const bool is_whole = std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.defined(); });
  TORCH_CHECK_TYPE(is_whole, name, ": a tensor argument is None\n  try: pass a tensor");
  const bool has_tangent =
      std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor._fw_grad(0).defined(); });
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent, name, ": an input has a forward-mode tangent, but kernels support reverse mode only",
                              "\n  try: use reverse mode, or pass tensor.detach()");
}

// Gradients whose derivative raises an error, instead of silently being none.
struct Once : torch::autograd::Function<Once> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext*, at::TensorList gradients, at::TensorList) {
    torch::autograd::variable_list found;
    for (const at::Tensor& gradient : gradients) found.push_back(gradient.view_as(gradient));
    return found;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    TORCH_CHECK(false, "the backward pass of a built operator cannot be differentiated again\n",
                "  try: for second derivatives, call the function that the operator was built from");
  }
};

}  // namespace fg
}  // namespace
