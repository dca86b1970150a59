// Runs the instructions of fusegen/runtime/instructions.py, under the same names. Their attributes are read once.

#pragma once

#include "native.h"

#include "library.h"

#include "attention.h"

#include <sys/mman.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

namespace executor {

// Readers of Python objects. Objects that the instructions own are held by raw pointers.

Object attribute(PyObject *object, const char *name) { return checked(PyObject_GetAttrString(object, name)); }

int64_t integer(PyObject *object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

int64_t integer(PyObject *object, const char *name) { return integer(attribute(object, name)); }

bool truth(PyObject *object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw python_error();
  return value;
}

bool truth(PyObject *object, const char *name) { return truth(attribute(object, name)); }

std::vector<Object> items(PyObject *object) {
  const Object sequence = checked(PySequence_Fast(object, "not a sequence"));
  std::vector<Object> elements;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(sequence.get()); ++index)
    elements.emplace_back(Py_NewRef(PySequence_Fast_GET_ITEM(sequence.get(), index)));
  return elements;
}

std::vector<int64_t> integers(PyObject *object) {
  std::vector<int64_t> values;
  for (const Object &item : items(object)) values.push_back(integer(item));
  return values;
}

[[noreturn]] void raise(const Object &error) {
  PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.get())), error);
  throw python_error();
}

at::ScalarType dtype_of(PyObject *object) {
  if (!THPDtype_Check(object)) fail(PyExc_TypeError, "not a dtype");
  return reinterpret_cast<THPDtype *>(object)->scalar_type;
}

at::Device device_of(PyObject *object) {
  if (!THPDevice_Check(object)) fail(PyExc_TypeError, "not a device");
  return reinterpret_cast<THPDevice *>(object)->device;
}

struct Frame {
  std::vector<at::Tensor> registers;
  PyObject *scalars;

  std::vector<at::Tensor> at(const std::vector<int64_t> &indices) const {
    std::vector<at::Tensor> tensors;
    for (int64_t index : indices) tensors.push_back(registers[index]);
    return tensors;
  }
};

// Releases the GIL in a scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState *state_;
};

struct alignas(128) Map {
  char bytes[128];
};

// True if no mode or transform may see or replace allocations.
bool may_bypass_torch() {
  return !c10::impl::dispatch_mode_enabled() && !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

Object wrapped(const at::Tensor &tensor) { return checked(THPVariable_Wrap(tensor)); }

const at::Tensor &unwrapped(PyObject *object) {
  if (!THPVariable_Check(object)) fail(PyExc_TypeError, "not a tensor");
  return THPVariable_Unpack(object);
}

Object list_of(at::TensorList tensors) {
  Object list = checked(PyList_New(tensors.size()));
  for (size_t n = 0; n < tensors.size(); ++n) PyList_SET_ITEM(list.get(), n, wrapped(tensors[n]).release());
  return list;
}

// An argument of a kernel: eight bytes, or a tensor map of 128.
struct Argument {
  enum class Kind { address, real, integer, constant, map, counter } kind;
  int64_t number = 0;  // offset in bytes, or the constant
  size_t at = 0;       // the register of an address
  PyObject *name = nullptr, *maps = nullptr, *counter = nullptr;
  std::unordered_map<uint64_t, Map> known;  // maps by address
  PyObject *unreachable = nullptr;

  uint64_t address(const Frame &frame) const {
    const at::Tensor &tensor = frame.registers[at];
    uint64_t start = 0;
    try {
      start = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    } catch (const c10::Error &) {  // tensors of torch.func have no address
    }
    if (!start && tensor.numel()) raise(checked(PyObject_CallNoArgs(unreachable)));
    return start + number;
  }

  uint64_t scalar(const Frame &frame) const {
    const Object value = checked(PyObject_GetItem(frame.scalars, name));
    union {
      double real;
      int64_t integer;
      uint64_t bits;
    } result;
    if (kind == Kind::real || PyFloat_Check(value.get())) {
      result.real = PyFloat_AsDouble(value);
      if (result.real == -1 && PyErr_Occurred()) throw python_error();
      if (kind == Kind::real) return result.bits;
      const bool fits = result.real >= -0x1p63 && result.real < 0x1p63;  // out of range gives -2^63, like x86 conversions
      result.integer = fits ? static_cast<int64_t>(result.real) : INT64_MIN;
      return result.bits;
    }
    result.integer = integer(value);
    return result.bits;
  }

  Map map(const Frame &frame) {
    const uint64_t start = address(frame);
    auto entry = known.find(start);
    if (entry == known.end()) {
      const Object encoded = checked(PyObject_CallMethod(maps, "make", "K", start));
      if (!PyBytes_Check(encoded.get()) || PyBytes_GET_SIZE(encoded.get()) != 128) fail(PyExc_TypeError, "not a tensor map");
      if (known.size() >= 64) known.clear();
      entry = known.emplace(start, Map()).first;
      std::copy_n(PyBytes_AS_STRING(encoded.get()), 128, entry->second.bytes);
    }
    return entry->second;
  }

  uint64_t bits(const Frame &frame) const {
    switch (kind) {
      case Kind::address:
        return address(frame);
      case Kind::constant:
        return static_cast<uint64_t>(number);
      case Kind::counter:
        return static_cast<uint64_t>(integer(checked(PyObject_CallMethod(counter, "value", nullptr))));
      default:
        return scalar(frame);
    }
  }
};

std::vector<Argument> arguments_of(PyObject *instruction, PyObject *unreachable) {
  std::vector<Argument> arguments;
  for (const Object &item : items(attribute(instruction, "arguments"))) {
    const std::string kind = Py_TYPE(item.get())->tp_name;
    Argument argument{Argument::Kind::constant};
    argument.unreachable = unreachable;
    if (kind == "ConstantValue") {
      argument.number = integer(item, "number");
    } else if (kind == "ScalarValue") {
      argument.kind = truth(item, "is_float") ? Argument::Kind::real : Argument::Kind::integer;
      argument.name = attribute(item, "name");
    } else if (kind == "CounterValue") {
      argument.kind = Argument::Kind::counter;
      argument.counter = item.get();
    } else if (kind == "Address" || kind == "TensorMap") {
      const bool is_map = kind == "TensorMap";
      const Object address = is_map ? attribute(item, "at") : Object(Py_NewRef(item.get()));
      argument.kind = is_map ? Argument::Kind::map : Argument::Kind::address;
      argument.at = integer(address, "register");
      argument.number = integer(address, "offset");
      if (is_map) argument.maps = attribute(item, "maps");
    } else {
      fail(PyExc_TypeError, kind);
    }
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

struct Instruction {
  virtual ~Instruction() = default;
  virtual void run(Frame &frame) = 0;
};

struct Allocate : Instruction {
  size_t at;
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype;
  at::Device device;
  bool is_large;

  explicit Allocate(PyObject *object)
      : at(integer(object, "register")),
        shape(integers(attribute(object, "shape"))),
        strides(integers(attribute(object, "strides"))),
        dtype(dtype_of(attribute(object, "dtype"))),
        device(device_of(attribute(object, "device"))),
        is_large(truth(object, "is_large")) {}

  at::Tensor allocate() const {
    if (may_bypass_torch() && device.is_cpu()) return at::Tensor(at::detail::empty_strided_cpu(shape, strides, dtype));
    if (c10::Allocator *allocator = may_bypass_torch() && device.is_cuda() ? c10::GetAllocator(at::kCUDA) : nullptr)
      return at::Tensor(at::detail::empty_strided_generic(shape, strides, allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
    return at::empty_strided(shape, strides, at::TensorOptions().dtype(dtype).device(device));
  }

  void run(Frame &frame) override {
    at::Tensor &tensor = frame.registers[at] = allocate();
    if (!is_large || !may_bypass_torch()) return;
    const auto address = reinterpret_cast<uintptr_t>(tensor.storage().data());
    constexpr uintptr_t page = 2 << 20;
    const uintptr_t first = (address + page - 1) / page * page;
    madvise(reinterpret_cast<void *>(first), (address + tensor.nbytes() - first) / page * page, MADV_HUGEPAGE);
  }
};

struct View : Instruction {
  size_t at, source;
  at::ScalarType dtype;
  std::vector<int64_t> shape, strides;
  int64_t offset;

  explicit View(PyObject *object)
      : at(integer(object, "register")),
        source(integer(object, "source")),
        dtype(dtype_of(attribute(object, "dtype"))),
        shape(integers(attribute(object, "shape"))),
        strides(integers(attribute(object, "strides"))),
        offset(integer(object, "offset")) {}

  void run(Frame &frame) override {
    const at::Tensor &base = frame.registers[source];
    if (!may_bypass_torch() || !base.has_storage() || base.key_set().has(c10::DispatchKey::Python)) {
      const at::Tensor typed = base.scalar_type() == dtype ? base : base.view(dtype);
      frame.registers[at] = at::as_strided(typed, shape, strides, typed.storage_offset() + offset);
      return;
    }
    // A view without autograd that bypasses the dispatcher, which takes longer than most launches.
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                               c10::scalarTypeToTypeMeta(dtype));
    const int64_t begin = base.storage_offset() * base.element_size() / static_cast<int64_t>(c10::elementSize(dtype));
    view.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides, begin + offset);
    frame.registers[at] = std::move(view);
  }
};

struct Release : Instruction {
  std::vector<int64_t> registers_to_release;

  explicit Release(PyObject *object) : registers_to_release(integers(attribute(object, "registers"))) {}

  void run(Frame &frame) override {
    for (int64_t index : registers_to_release) frame.registers[index].reset();
  }
};

struct Key : Instruction {
  size_t at;
  PyObject *instruction;

  explicit Key(PyObject *object) : at(integer(object, "register")), instruction(object) {}

  void run(Frame &frame) override {
    frame.registers[at] = unwrapped(checked(PyObject_CallMethod(instruction, "key", "O", frame.scalars)));
  }
};

// Structures of cuda.h.
struct LaunchAttribute {
  unsigned number, gap;
  int value;
  unsigned char rest[60];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned attribute_count;
};

struct Launch : Instruction {
  using Function = int (*)(const LaunchConfig *, void *, void **, void **);
  PyObject *site, *stream_now, *device;
  std::vector<Argument> arguments;
  Function function;
  void *kernel;
  LaunchConfig config;
  bool overlaps;
  size_t maps = 0;

  Launch(PyObject *object, PyObject *stream_now, PyObject *unreachable)
      : site(attribute(object, "site")), stream_now(stream_now), device(attribute(site, "device")), arguments(arguments_of(object, unreachable)) {
    function = reinterpret_cast<Function>(integer(site, "function"));
    kernel = reinterpret_cast<void *>(integer(site, "handle"));
    overlaps = truth(site, "overlaps");
    config = {{static_cast<unsigned>(integer(site, "grid")), 1, 1}, {static_cast<unsigned>(integer(site, "block")), 1, 1},
              static_cast<unsigned>(integer(site, "shared_bytes")), nullptr, nullptr, overlaps ? 1u : 0u};
    for (const Argument &argument : arguments) maps += argument.kind == Argument::Kind::map;
  }

  int launch(void **table) {
    LaunchAttribute overlap{6, 0, 1, {}};  // programmatic dependent launch
    LaunchConfig current = config;
    const Object stream = checked(PyObject_CallOneArg(stream_now, device));
    current.stream = PyLong_AsVoidPtr(stream);
    if (!current.stream && PyErr_Occurred()) throw python_error();
    if (overlaps) current.attributes = &overlap;
    const WithoutGil other_threads_run;
    return function(&current, kernel, table, nullptr);
  }

  void run(Frame &frame) override {
    std::vector<uint64_t> numbers(arguments.size());
    std::vector<void *> table(arguments.size());
    std::vector<Map> encoded_maps(maps);
    for (size_t n = 0, at = 0; n < arguments.size(); ++n) {
      if (arguments[n].kind == Argument::Kind::map) {
        encoded_maps[at] = arguments[n].map(frame);
        table[n] = &encoded_maps[at++];
      } else {
        numbers[n] = arguments[n].bits(frame);
        table[n] = &numbers[n];
      }
    }
    int status = launch(table.data());
    if (!status) return;
    if (truth(checked(PyObject_CallMethod(site, "made_current", "i", status)))) status = launch(table.data());
    if (status) checked(PyObject_CallMethod(site, "refuse", "i", status));
  }

};

struct HostLaunch : Instruction {
  void (*kernel)(const void *);
  std::vector<Argument> arguments;
  PyObject *refusal;

  HostLaunch(PyObject *object, PyObject *unreachable)
      : kernel(reinterpret_cast<void (*)(const void *)>(integer(object, "address"))),
        arguments(arguments_of(object, unreachable)),
        refusal(attribute(object, "refusal")) {}

  void run(Frame &frame) override {
    std::vector<uint64_t> numbers(arguments.size());
    for (size_t n = 0; n < arguments.size(); ++n) numbers[n] = arguments[n].bits(frame);
    const char *message = nullptr;
    if (refusal != Py_None) numbers.push_back(reinterpret_cast<uint64_t>(&message));
    {
      const WithoutGil other_threads_run;
      kernel(numbers.data());
    }
    if (!message) return;
    raise(checked(PyObject_CallFunction(refusal, "s", message)));
  }
};

struct Matmul : Instruction {
  size_t a, b, out;
  bool is_batched;
  std::optional<at::ScalarType> wider;

  explicit Matmul(PyObject *object)
      : a(integer(object, "a")), b(integer(object, "b")), out(integer(object, "out")), is_batched(truth(object, "is_batched")) {
    const Object dtype = attribute(object, "wider");
    if (dtype.get() != Py_None) wider = dtype_of(dtype);
  }

  void run(Frame &frame) override {
    const at::Tensor &x = frame.registers[a], &y = frame.registers[b];
    at::Tensor &result = frame.registers[out];
    const at::AutoDispatchBelowADInplaceOrView guard;  // skips autograd inside a call
    const WithoutGil other_threads_run;
    if (wider && is_batched) at::bmm_out(result, x, y, *wider);
    else if (wider) at::mm_out(result, x, y, *wider);
    else if (is_batched) at::bmm_out(result, x, y);
    else at::mm_out(result, x, y);
  }
};

// A matmul that no single torch function computes on these views.
struct MultiStepMatmul : Instruction {
  size_t a, b, out;
  bool adds;

  explicit MultiStepMatmul(PyObject *object)
      : a(integer(object, "a")), b(integer(object, "b")), out(integer(object, "out")), adds(truth(object, "adds")) {}

  void run(Frame &frame) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const WithoutGil other_threads_run;
    (adds ? fg::multiply_into : fg::multiply)(frame.registers[a], frame.registers[b], frame.registers[out]);
  }
};

struct CallLibrary : Instruction {
  struct Result {
    size_t at;
    std::vector<int64_t> order, shape;
  };
  Object function;
  std::string name;
  fg::Wanted requested;
  std::vector<double> settings;
  std::vector<int64_t> operands;
  std::vector<Result> results;

  explicit CallLibrary(PyObject *object)
      : function(attribute(object, "function")), name(PyUnicode_AsUTF8(attribute(object, "name"))), operands(integers(attribute(object, "operands"))) {
    const std::vector<Object> values = items(attribute(object, "leading_arguments"));
    for (const Object &request : items(values.at(0))) requested.emplace_back(integer(items(request).at(0)), dtype_of(items(request).at(1)));
    for (size_t n = 1; n < values.size(); ++n) settings.push_back(PyFloat_AsDouble(values[n]));
    if (PyErr_Occurred()) throw python_error();
    for (const Object &item : items(attribute(object, "results"))) {
      const std::vector<Object> fields = items(item);
      results.push_back({static_cast<size_t>(integer(fields.at(0))), integers(fields.at(1)), integers(fields.at(2))});
    }
  }

  // On CPUs, dropout and the gradient of a bias are used by the emulator only, and implemented in Python.
  bool needs_python(const std::vector<at::Tensor> &tensors) const {
    const bool needs_bias = std::any_of(requested.begin(), requested.end(), [](const auto &request) { return request.first == 3; });
    return name.rfind("attention", 0) == 0 && !tensors[0].is_cuda() && (settings[2] || needs_bias);
  }

  std::vector<at::Tensor> call(const std::vector<at::Tensor> &tensors) const {
    if (needs_python(tensors)) {
      const Object arguments = checked(PyList_AsTuple(list_of(tensors)));
      std::vector<at::Tensor> outputs;
      for (const Object &output : items(checked(PyObject_CallObject(function, arguments)))) outputs.push_back(unwrapped(output));
      return outputs;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    const WithoutGil other_threads_run;
    if (name == "attention") return fg::attention(requested, settings, tensors);
    if (name == "attention_backward") return fg::attention_backward(requested, settings, tensors);
    if (name == "topk") return fg::topk(requested, settings[0], static_cast<int64_t>(settings[1]), tensors);
    const auto length = static_cast<int64_t>(settings[0]);
    return name == "last" ? fg::last(requested, length, tensors) : fg::scatter_add(requested, length, tensors);
  }

  void run(Frame &frame) override {
    const std::vector<at::Tensor> outputs = call(frame.at(operands));
    for (size_t n = 0; n < results.size(); ++n) {
      at::Tensor tensor = outputs.at(n);
      const Result &result = results[n];
      for (size_t dim = 0; dim < result.order.size(); ++dim)
        if (result.order[dim] != static_cast<int64_t>(dim)) {
          tensor = tensor.permute(result.order);
          break;
        }
      if (!tensor.is_contiguous() || tensor.sizes() != at::IntArrayRef(result.shape)) tensor = tensor.contiguous().view(result.shape);
      frame.registers[result.at] = std::move(tensor);
    }
  }
};

struct Program;

struct CallFunction : Instruction {
  PyObject *function;
  std::unique_ptr<Program> nested;  // set if the function consists of instructions
  std::vector<int64_t> tensors;

  explicit CallFunction(PyObject *object);
  void run(Frame &frame) override;
};

struct Program {
  size_t inputs;
  std::vector<at::Tensor> held;
  std::vector<std::unique_ptr<Instruction>> body;
  std::vector<int64_t> results;
  PyObject *pack_results;
  Object stream_now, unreachable;
  int64_t gpu = -1;

  explicit Program(PyObject *object)
      : inputs(integer(object, "inputs")),
        results(integers(attribute(object, "results"))),
        pack_results(attribute(object, "pack_results")) {
    for (const Object &item : items(attribute(object, "initial"))) held.push_back(item.get() == Py_None ? at::Tensor() : unwrapped(item));
    const Object index = attribute(object, "gpu");
    if (index.get() != Py_None) gpu = integer(index);
    const Object instructions = checked(PyImport_ImportModule("fusegen.runtime.instructions"));
    unreachable = attribute(instructions, "unreachable");
    if (gpu >= 0) stream_now = std::move(items(checked(PyObject_CallMethod(attribute(instructions, "cuda"), "queries", nullptr))).at(0));
    for (const Object &item : items(attribute(object, "body"))) body.push_back(instruction(item));
  }

  std::unique_ptr<Instruction> instruction(PyObject *object) const {
    const std::string kind = Py_TYPE(object)->tp_name;
    if (kind == "Allocate") return std::make_unique<Allocate>(object);
    if (kind == "View") return std::make_unique<View>(object);
    if (kind == "Release") return std::make_unique<Release>(object);
    if (kind == "MakeKey") return std::make_unique<Key>(object);
    if (kind == "LaunchKernel") return std::make_unique<Launch>(object, stream_now, unreachable);
    if (kind == "HostLaunch") return std::make_unique<HostLaunch>(object, unreachable);
    if (kind == "Matmul") return std::make_unique<Matmul>(object);
    if (kind == "MultiStepMatmul") return std::make_unique<MultiStepMatmul>(object);
    if (kind == "CallLibrary") return std::make_unique<CallLibrary>(object);
    if (kind == "CallFunction") return std::make_unique<CallFunction>(object);
    fail(PyExc_TypeError, kind);
  }

  void run(Frame &frame) {
    frame.registers.insert(frame.registers.end(), held.begin(), held.end());
    c10::OptionalDeviceGuard guard;
    if (gpu >= 0) guard.reset_device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
    for (const auto &step : body) step->run(frame);
  }

  Object packed(const Frame &frame) const {
    if (pack_results == Py_None) return results.empty() ? Object(Py_NewRef(Py_None)) : wrapped(frame.registers[results[0]]);
    return checked(PyObject_CallOneArg(pack_results, list_of(frame.at(results))));
  }
};

CallFunction::CallFunction(PyObject *object) : function(attribute(object, "function")), tensors(integers(attribute(object, "tensors"))) {
  if (std::string(Py_TYPE(function)->tp_name) == "Instructions") nested = std::make_unique<Program>(function);
}

void CallFunction::run(Frame &frame) {
  if (nested) {
    Frame inner{frame.at(tensors), frame.scalars};
    return nested->run(inner);
  }
  checked(PyObject_CallFunctionObjArgs(function, list_of(frame.at(tensors)).get(), frame.scalars, nullptr));
}

struct Executor {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *instructions, *donated;
  Program *program;

  void release() { delete program; }
};

// executor(tensors, scalars) -> the user function's result.
PyObject *call(PyObject *object, PyObject *const *arguments, size_t count, PyObject *names) {
  if (PyVectorcall_NARGS(count) != 2 || names) {
    PyErr_SetString(PyExc_TypeError, "an executor takes tensors and scalars");
    return nullptr;
  }
  const auto &self = *reinterpret_cast<Executor *>(object);
  HANDLE_TH_ERRORS
  const Object tensors = checked(PySequence_Fast(arguments[0], "the tensors are not a sequence"));
  if (PySequence_Fast_GET_SIZE(tensors.get()) != static_cast<Py_ssize_t>(self.program->inputs)) fail(PyExc_ValueError, "wrong number of tensors");
  if (!self.instructions) fail(PyExc_RuntimeError, "the executor was cleared");
  Frame frame{{}, arguments[1]};
  frame.registers.reserve(self.program->inputs + self.program->held.size());
  for (size_t n = 0; n < self.program->inputs; ++n) frame.registers.push_back(unwrapped(PySequence_Fast_GET_ITEM(tensors.get(), n)));
  const bool is_donated = reinterpret_cast<PyObject *>(Py_TYPE(arguments[0])) == self.donated;
  if (is_donated && PyList_SetSlice(arguments[0], 0, PY_SSIZE_T_MAX, nullptr) < 0) throw python_error();
  self.program->run(frame);
  return self.program->packed(frame).release();
  END_HANDLE_TH_ERRORS
}

// Executor(instructions)
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  PyObject *instructions;
  if (!PyArg_ParseTuple(arguments, "O", &instructions)) return nullptr;
  HANDLE_TH_ERRORS
  Object created = checked(type->tp_alloc(type, 0));
  auto *self = reinterpret_cast<Executor *>(created.get());
  self->call = call;
  self->instructions = Py_NewRef(instructions);
  self->donated = attribute(checked(PyImport_ImportModule("fusegen.runtime.instructions")), "Donated").release();
  self->program = new Program(instructions);
  return created.release();
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject *object, visitproc visit, void *arg) {
  auto *self = reinterpret_cast<Executor *>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->instructions);
  Py_VISIT(self->donated);
  return 0;
}

int clear(PyObject *object) {
  auto *self = reinterpret_cast<Executor *>(object);
  Py_CLEAR(self->instructions);
  Py_CLEAR(self->donated);
  return 0;
}

PyObject *type() { return callable_type<Executor, clear>("fusegen_native.Executor", make, traverse); }

}  // namespace executor
