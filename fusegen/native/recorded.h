// A call with gradients: an autograd node whose two passes are executors. `NodeCall` of fusegen/runtime/node.py is the equivalent
// in Python.

#pragma once

#include "executor.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace recorded {

using executor::attribute;
using executor::Executor;
using executor::Frame;
using executor::integer;
using executor::integers;
using executor::items;
using executor::Program;
using executor::wrapped;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // shared_ptr, or intrusive_ptr in later versions of torch

constexpr int64_t kNone = INT64_MIN;  // no source
constexpr size_t kMostPasses = 4;

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// The key part of a tensor (fusegen/runtime/arguments.py).
struct Layout {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  at::Device device;
  uintptr_t address_bits;  // low bits of the address

  explicit Layout(const at::Tensor &tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()),
        address_bits(address_bits_of(tensor)) {}

  static uintptr_t address_bits_of(const at::Tensor &tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & 15; }

  // True for a tensor that only Python can handle.
  static bool needs_python(const at::Tensor &tensor) {
    constexpr c10::DispatchKeySet strange({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return tensor.layout() != at::kStrided || tensor.is_nested() || tensor.key_set().has_any(strange) || !tensor.has_storage() ||
           !tensor.const_data_ptr() || tensor._fw_grad(0).defined();
  }

  bool matches(const at::Tensor &tensor) const {
    return !needs_python(tensor) && tensor.scalar_type() == dtype && tensor.device() == device && tensor.sizes() == at::IntArrayRef(sizes) &&
           tensor.strides() == at::IntArrayRef(strides) && address_bits_of(tensor) == address_bits;
  }
};

// A number of a call, stored without a Python object so that nodes need no GIL.
struct Number {
  bool is_real;
  double real;
  int64_t integer;

  Object to_python() const { return checked(is_real ? PyFloat_FromDouble(real) : PyLong_FromLongLong(integer)); }
};

// Converts Python numbers; nullopt for subclasses, and beyond 64 bits.
std::optional<std::vector<Number>> numbers_of(PyObject *list) {
  std::vector<Number> numbers;
  for (const Object &item : items(list)) {
    if (PyFloat_CheckExact(item.get())) {
      numbers.push_back({true, PyFloat_AS_DOUBLE(item.get()), 0});
    } else {
      int overflow = 1;
      const int64_t value = PyLong_CheckExact(item.get()) ? PyLong_AsLongLongAndOverflow(item, &overflow) : 0;
      if (overflow) return std::nullopt;
      numbers.push_back({false, 0, value});
    }
  }
  return numbers;
}

Object list_of(const std::vector<Number> &numbers) {
  Object list = checked(PyList_New(numbers.size()));
  for (size_t n = 0; n < numbers.size(); ++n) PyList_SET_ITEM(list.get(), n, numbers[n].to_python().release());
  return list;
}

// True unless the tensor has a Python subclass.
bool is_plain_tensor(const at::Tensor &tensor) { return THPVariable_CheckExact(wrapped(tensor)); }

// A backward pass for given layouts.
struct Pass {
  std::vector<Layout> layouts;
  Object executor, scalars;
  std::vector<int64_t> order;  // of the values, for the executor

  bool matches_values(const variable_list &values) const {
    for (size_t n = 0; n < values.size(); ++n)
      if (!layouts[n].matches(values[n])) return false;
    return true;
  }

  Program &program() const { return *reinterpret_cast<Executor *>(executor.get())->program; }
};

// Data shared by the nodes of all calls; requires the GIL.
struct Plan {
  Object node, executor;
  std::string name;
  size_t count;
  std::vector<bool> is_recorded;
  std::vector<int64_t> saved_positions, floats, gradients;
  std::vector<std::shared_ptr<Pass>> passes;

  Plan(PyObject *object, PyObject *forward)
      : node(Py_NewRef(object)),
        executor(Py_NewRef(forward)),
        count(integer(object, "count")),
        is_recorded(count, true),
        saved_positions(integers(attribute(object, "saved"))),
        floats(integers(attribute(object, "floats"))) {
    const char *text = PyUnicode_AsUTF8(attribute(object, "name"));
    if (!text) throw python_error();
    name = text;
    for (int64_t index : integers(attribute(object, "plain"))) is_recorded[index] = false;
    for (const Object &source : items(attribute(object, "gradients"))) gradients.push_back(source.get() == Py_None ? kNone : integer(source));
    for (int64_t result : program().results)
      if (result < static_cast<int64_t>(program().inputs)) fail(PyExc_ValueError, "a result of the recorded call is an argument");
  }

  ~Plan() {
    if (Py_IsInitialized()) {
      const WithGil gil;
      passes.clear();
      node = Object();
      executor = Object();
    } else {  // at exit
      node.release();
      executor.release();
      for (const auto &pass : passes) {
        pass->executor.release();
        pass->scalars.release();
      }
    }
  }

  Program &program() const { return *reinterpret_cast<Executor *>(executor.get())->program; }

  // Looks up or creates the backward pass; null if Python must run it.
  std::shared_ptr<Pass> pass_for(const variable_list &values, const std::vector<Number> &numbers) {
    for (const auto &pass : passes)
      if (pass->matches_values(values)) return pass;
    if (std::any_of(values.begin(), values.end(), Layout::needs_python)) return nullptr;
    const Object created =
        checked(PyObject_CallMethod(node, "native_pass", "OO", executor::list_of(values).get(), list_of(numbers).get()));
    if (created.get() == Py_None) return nullptr;
    const std::vector<Object> fields = items(created);
    auto pass = std::make_shared<Pass>();
    for (const at::Tensor &value : values) pass->layouts.emplace_back(value);
    pass->executor = Object(Py_NewRef(fields.at(0).get()));
    pass->order = integers(fields.at(1));
    pass->scalars = Object(Py_NewRef(fields.at(2).get()));
    if (passes.size() >= kMostPasses) passes.pop_back();
    passes.insert(passes.begin(), pass);
    return pass;
  }
};

struct Backward : torch::autograd::Node {
  std::shared_ptr<Plan> plan;
  std::vector<SavedVariable> saved;
  std::vector<Number> numbers;
  bool is_last = false;  // the graph is not retained

  std::string name() const override { return plan->name; }

  void will_release_variables() override { is_last = true; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable &each : saved) each.reset_data();
  }

  variable_list apply(variable_list &&upstream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list values, floats;
    for (SavedVariable &variable : saved) values.push_back(variable.unpack(getptr()));
    if (is_last)
      for (SavedVariable &variable : saved) variable.reset_data();  // frees the saved tensors
    for (int64_t index : plan->floats) floats.push_back(upstream[index].defined() ? upstream[index] : input_metadata(index).zeros_like());
    upstream.clear();
    values.insert(values.end(), floats.begin(), floats.end());
    const WithGil gil;
    try {
      const bool is_plain = !at::GradMode::is_enabled() && executor::may_bypass_torch() && std::all_of(floats.begin(), floats.end(), is_plain_tensor);
      const std::shared_ptr<Pass> pass = is_plain ? plan->pass_for(values, numbers) : nullptr;
      const Object scalars = pass ? scalars_of(*pass) : Object();
      return scalars.get() ? by_pass(*pass, scalars, std::move(values), std::move(floats)) : by_python(values, floats);
    } catch (python_error &error) {
      error.persist();
      throw;
    }
  }

 private:
  // Null if the computation fails; the Python path then raises the error.
  Object scalars_of(const Pass &pass) const {
    if (pass.scalars.get() == Py_None) return Object(Py_NewRef(Py_None));
    Object scalars = PyObject_CallOneArg(pass.scalars, list_of(numbers));
    if (!scalars.get()) PyErr_Clear();
    return scalars;
  }

  variable_list by_pass(const Pass &pass, PyObject *scalars, variable_list values, variable_list floats) const {
    Frame frame{{}, scalars};
    for (int64_t place : pass.order) frame.registers.push_back(values[place]);
    values.clear();
    const auto is_passed_through = [](int64_t source) { return source < 0 && source != kNone; };
    if (std::none_of(plan->gradients.begin(), plan->gradients.end(), is_passed_through)) floats.clear();
    Program &program = pass.program();
    program.run(frame);
    variable_list found;
    for (size_t n = 0; n < num_outputs(); ++n) {
      const int64_t source = plan->gradients[n];
      found.push_back(source == kNone ? at::Tensor() : source >= 0 ? frame.registers[program.results[source]] : floats[~source]);
    }
    return found;
  }

  // `BackwardNode.gradients_by` also raises the errors.
  variable_list by_python(const variable_list &values, const variable_list &floats) const {
    const Object results = checked(PyObject_CallMethod(plan->node, "gradients_by", "OOO", executor::list_of(values).get(),
                                                    executor::list_of(floats).get(), list_of(numbers).get()));
    variable_list gradients;
    for (const Object &gradient : items(results)) gradients.push_back(gradient.get() == Py_None ? at::Tensor() : executor::unwrapped(gradient));
    gradients.resize(num_outputs());  // numbers have no gradients
    return gradients;
  }
};

template <class Pointer, class NodeType>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return Pointer(new NodeType, [](auto *node) { deleteNode(node); });
  else
    return c10::make_intrusive<NodeType>();
}

struct Recorded {
  PyObject_HEAD
  vectorcallfunc call;
  std::shared_ptr<Plan> *plan;

  void release() { delete plan; }
};

// recorded(tensors, scalars of the forward pass, numbers of the backward pass) -> a tuple of results; None under modes or
// transforms, and for unsupported numbers.
PyObject *call(PyObject *object, PyObject *const *arguments, size_t count, PyObject *names) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(count) != 3 || names) fail(PyExc_TypeError, "a recorded call takes tensors, scalars and numbers");
  const auto &self = *reinterpret_cast<Recorded *>(object);
  if (!self.plan) fail(PyExc_RuntimeError, "the recorded call was cleared");
  if (!executor::may_bypass_torch()) Py_RETURN_NONE;
  std::optional<std::vector<Number>> numbers = numbers_of(arguments[2]);
  if (!numbers) Py_RETURN_NONE;
  const std::shared_ptr<Plan> plan = *self.plan;
  variable_list values;
  for (const Object &item : items(arguments[0])) values.push_back(executor::unwrapped(item));
  Program &program = plan->program();
  if (values.size() != program.inputs) fail(PyExc_ValueError, "wrong number of tensors");
  Frame frame{values, arguments[1]};
  {
    const at::AutoGradMode no_grad(false);
    program.run(frame);
  }
  const NodePointer pointer = new_node<NodePointer, Backward>();
  auto *node = static_cast<Backward *>(pointer.get());
  node->plan = plan;
  node->numbers = std::move(*numbers);
  node->set_next_edges(torch::autograd::collect_next_edges(values));
  const auto output = [&](int64_t position) -> const at::Tensor & { return frame.registers[program.results[position]]; };
  for (size_t position = 0; position < plan->count; ++position) {
    if (plan->is_recorded[position]) torch::autograd::set_history(output(position), pointer);
    else node->add_input_metadata(output(position));  // its gradient is zeros
  }
  for (int64_t position : plan->saved_positions) {
    const bool is_output = position < 0 && ~position < static_cast<int64_t>(plan->count) && plan->is_recorded[~position];
    node->saved.emplace_back(position >= 0 ? values[position] : output(~position), is_output);
  }
  const Object results = checked(PyTuple_New(plan->count));
  for (size_t position = 0; position < plan->count; ++position) PyTuple_SET_ITEM(results.get(), position, wrapped(output(position)).release());
  return Py_NewRef(results.get());
  END_HANDLE_TH_ERRORS
}

// Recorded(node, the executor of the forward pass)
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  HANDLE_TH_ERRORS
  PyObject *node, *forward;
  if (!PyArg_ParseTuple(arguments, "OO", &node, &forward)) return nullptr;
  if (strcmp(Py_TYPE(forward)->tp_name, "fusegen_native.Executor")) fail(PyExc_TypeError, "not an executor");
  Object created = checked(type->tp_alloc(type, 0));
  auto *self = reinterpret_cast<Recorded *>(created.get());
  self->call = call;
  self->plan = new std::shared_ptr<Plan>(std::make_shared<Plan>(node, forward));
  return created.release();
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject *object, visitproc visit, void *arg) {
  auto *self = reinterpret_cast<Recorded *>(object);
  Py_VISIT(Py_TYPE(object));
  if (self->plan && self->plan->use_count() == 1) {  // otherwise nodes own it too
    Py_VISIT((*self->plan)->node.get());
    Py_VISIT((*self->plan)->executor.get());
  }
  return 0;
}

int clear(PyObject *object) {
  auto *self = reinterpret_cast<Recorded *>(object);
  std::shared_ptr<Plan> *taken = self->plan;
  self->plan = nullptr;
  delete taken;
  return 0;
}

PyObject *type() { return callable_type<Recorded, clear>("fusegen_native.Recorded", make, traverse); }

}  // namespace recorded
