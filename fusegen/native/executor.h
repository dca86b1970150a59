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
  const int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw python_error();
  return found;
}

int64_t integer(PyObject *object, const char *name) { return integer(attribute(object, name)); }

bool truth(PyObject *object) {
  const int found = PyObject_IsTrue(object);
  if (found < 0) throw python_error();
  return found;
}

bool truth(PyObject *object, const char *name) { return truth(attribute(object, name)); }

std::vector<Object> items(PyObject *object) {
  const Object sequence = checked(PySequence_Fast(object, "not a sequence"));
  std::vector<Object> found;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(sequence.get()); ++at)
    found.emplace_back(Py_NewRef(PySequence_Fast_GET_ITEM(sequence.get(), at)));
  return found;
}

std::vector<int64_t> integers(PyObject *object) {
  std::vector<int64_t> found;
  for (const Object &item : items(object)) found.push_back(integer(item));
  return found;
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

  std::vector<at::Tensor> at(const std::vector<int64_t> &places) const {
    std::vector<at::Tensor> found;
    for (int64_t place : places) found.push_back(registers[place]);
    return found;
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
  enum class Kind { address, real, integer, constant, map } kind;
  int64_t number = 0;  // offset in bytes, or the constant
  size_t at = 0;       // the register of an address
  PyObject *name = nullptr, *maps = nullptr;
  std::unordered_map<uint64_t, Map> known;  // maps by address
  PyObject *unreachable = nullptr;

  uint64_t address(const Frame &frame) const {
    const at::Tensor &tensor = frame.registers[at];
    uint64_t found = 0;
    try {
      found = reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
    } catch (const c10::Error &) {  // tensors of torch.func have no address
    }
    if (!found && tensor.numel()) raise(checked(PyObject_CallNoArgs(unreachable)));
    return found + number;
  }

  uint64_t scalar(const Frame &frame) const {
    const Object value = checked(PyObject_GetItem(frame.scalars, name));
    union {
      double real;
      int64_t integer;
      uint64_t bits;
    } found;
    if (kind == Kind::real || PyFloat_Check(value.get())) {
      found.real = PyFloat_AsDouble(value);
      if (found.real == -1 && PyErr_Occurred()) throw python_error();
      if (kind == Kind::real) return found.bits;
      const bool fits = found.real >= -0x1p63 && found.real < 0x1p63;  // out of range gives -2^63, like x86 conversions
      found.integer = fits ? static_cast<int64_t>(found.real) : INT64_MIN;
      return found.bits;
    }
    found.integer = integer(value);
    return found.bits;
  }

  Map map(const Frame &frame) {
    const uint64_t at = address(frame);
    auto found = known.find(at);
    if (found == known.end()) {
      const Object made = checked(PyObject_CallMethod(maps, "make", "K", at));
      if (!PyBytes_Check(made.get()) || PyBytes_GET_SIZE(made.get()) != 128) fail(PyExc_TypeError, "not a tensor map");
      if (known.size() >= 64) known.clear();
      found = known.emplace(at, Map()).first;
      std::copy_n(PyBytes_AS_STRING(made.get()), 128, found->second.bytes);
    }
    return found->second;
  }

  uint64_t bits(const Frame &frame) const {
    switch (kind) {
      case Kind::address:
        return address(frame);
      case Kind::constant:
        return static_cast<uint64_t>(number);
      default:
        return scalar(frame);
    }
  }
};

std::vector<Argument> arguments_of(PyObject *instruction, PyObject *unreachable) {
  std::vector<Argument> found;
  for (const Object &item : items(attribute(instruction, "arguments"))) {
    const std::string kind = Py_TYPE(item.get())->tp_name;
    Argument each{Argument::Kind::constant};
    each.unreachable = unreachable;
    if (kind == "ConstantValue") {
      each.number = integer(item, "number");
    } else if (kind == "ScalarValue") {
      each.kind = truth(item, "is_float") ? Argument::Kind::real : Argument::Kind::integer;
      each.name = attribute(item, "name");
    } else if (kind == "Address" || kind == "TensorMap") {
      const bool is_map = kind == "TensorMap";
      const Object place = is_map ? attribute(item, "at") : Object(Py_NewRef(item.get()));
      each.kind = is_map ? Argument::Kind::map : Argument::Kind::address;
      each.at = integer(place, "register");
      each.number = integer(place, "offset");
      if (is_map) each.maps = attribute(item, "maps");
    } else {
      fail(PyExc_TypeError, kind);
    }
    found.push_back(std::move(each));
  }
  return found;
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

  explicit Allocate(PyObject *given)
      : at(integer(given, "register")),
        shape(integers(attribute(given, "shape"))),
        strides(integers(attribute(given, "strides"))),
        dtype(dtype_of(attribute(given, "dtype"))),
        device(device_of(attribute(given, "device"))),
        is_large(truth(given, "is_large")) {}

  at::Tensor made() const {
    if (may_bypass_torch() && device.is_cpu()) return at::Tensor(at::detail::empty_strided_cpu(shape, strides, dtype));
    if (c10::Allocator *allocator = may_bypass_torch() && device.is_cuda() ? c10::GetAllocator(at::kCUDA) : nullptr)
      return at::Tensor(at::detail::empty_strided_generic(shape, strides, allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
    return at::empty_strided(shape, strides, at::TensorOptions().dtype(dtype).device(device));
  }

  void run(Frame &frame) override {
    at::Tensor &tensor = frame.registers[at] = made();
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

  explicit View(PyObject *given)
      : at(integer(given, "register")),
        source(integer(given, "source")),
        dtype(dtype_of(attribute(given, "dtype"))),
        shape(integers(attribute(given, "shape"))),
        strides(integers(attribute(given, "strides"))),
        offset(integer(given, "offset")) {}

  void run(Frame &frame) override {
    const at::Tensor &whole = frame.registers[source];
    if (!may_bypass_torch() || !whole.has_storage() || whole.key_set().has(c10::DispatchKey::Python)) {
      const at::Tensor typed = whole.scalar_type() == dtype ? whole : whole.view(dtype);
      frame.registers[at] = at::as_strided(typed, shape, strides, typed.storage_offset() + offset);
      return;
    }
    // A view without autograd that bypasses the dispatcher, which takes longer than most launches.
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()), whole.key_set(),
                                                               c10::scalarTypeToTypeMeta(dtype));
    const int64_t begin = whole.storage_offset() * whole.element_size() / static_cast<int64_t>(c10::elementSize(dtype));
    view.unsafeGetTensorImpl()->set_sizes_and_strides(shape, strides, begin + offset);
    frame.registers[at] = std::move(view);
  }
};

struct Release : Instruction {
  std::vector<int64_t> places;

  explicit Release(PyObject *given) : places(integers(attribute(given, "registers"))) {}

  void run(Frame &frame) override {
    for (int64_t place : places) frame.registers[place].reset();
  }
};

struct Key : Instruction {
  size_t at;
  PyObject *instruction;

  explicit Key(PyObject *given) : at(integer(given, "register")), instruction(given) {}

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

  Launch(PyObject *given, PyObject *stream_now, PyObject *unreachable)
      : site(attribute(given, "site")), stream_now(stream_now), device(attribute(site, "device")), arguments(arguments_of(given, unreachable)) {
    function = reinterpret_cast<Function>(integer(site, "function"));
    kernel = reinterpret_cast<void *>(integer(site, "handle"));
    overlaps = truth(site, "overlaps");
    config = {{static_cast<unsigned>(integer(site, "grid")), 1, 1}, {static_cast<unsigned>(integer(site, "block")), 1, 1},
              static_cast<unsigned>(integer(site, "shared_bytes")), nullptr, nullptr, overlaps ? 1u : 0u};
    for (const Argument &each : arguments) maps += each.kind == Argument::Kind::map;
  }

  int launched(void **table) {
    LaunchAttribute early{6, 0, 1, {}};  // programmatic dependent launch
    LaunchConfig now = config;
    const Object stream = checked(PyObject_CallOneArg(stream_now, device));
    now.stream = PyLong_AsVoidPtr(stream);
    if (!now.stream && PyErr_Occurred()) throw python_error();
    if (overlaps) now.attributes = &early;
    const WithoutGil other_threads_run;
    return function(&now, kernel, table, nullptr);
  }

  void run(Frame &frame) override {
    std::vector<uint64_t> numbers(arguments.size());
    std::vector<void *> table(arguments.size());
    std::vector<Map> found(maps);
    for (size_t n = 0, at = 0; n < arguments.size(); ++n) {
      if (arguments[n].kind == Argument::Kind::map) {
        found[at] = arguments[n].map(frame);
        table[n] = &found[at++];
      } else {
        numbers[n] = arguments[n].bits(frame);
        table[n] = &numbers[n];
      }
    }
    int status = launched(table.data());
    if (!status) return;
    if (truth(checked(PyObject_CallMethod(site, "made_current", "i", status)))) status = launched(table.data());
    if (status) checked(PyObject_CallMethod(site, "refuse", "i", status));
  }

};

struct HostLaunch : Instruction {
  void (*kernel)(const void *);
  std::vector<Argument> arguments;
  PyObject *refusal;

  HostLaunch(PyObject *given, PyObject *unreachable)
      : kernel(reinterpret_cast<void (*)(const void *)>(integer(given, "address"))),
        arguments(arguments_of(given, unreachable)),
        refusal(attribute(given, "refusal")) {}

  void run(Frame &frame) override {
    std::vector<uint64_t> numbers(arguments.size());
    for (size_t n = 0; n < arguments.size(); ++n) numbers[n] = arguments[n].bits(frame);
    const char *failed = nullptr;
    if (refusal != Py_None) numbers.push_back(reinterpret_cast<uint64_t>(&failed));
    {
      const WithoutGil other_threads_run;
      kernel(numbers.data());
    }
    if (!failed) return;
    raise(checked(PyObject_CallFunction(refusal, "s", failed)));
  }
};

struct Product : Instruction {
  size_t a, b, out;
  bool is_batched;
  std::optional<at::ScalarType> wider;

  explicit Product(PyObject *given)
      : a(integer(given, "a")), b(integer(given, "b")), out(integer(given, "out")), is_batched(truth(given, "is_batched")) {
    const Object dtype = attribute(given, "wider");
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
struct Multiply : Instruction {
  size_t a, b, out;
  bool adds;

  explicit Multiply(PyObject *given)
      : a(integer(given, "a")), b(integer(given, "b")), out(integer(given, "out")), adds(truth(given, "adds")) {}

  void run(Frame &frame) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const WithoutGil other_threads_run;
    (adds ? fg::multiply_into : fg::multiply)(frame.registers[a], frame.registers[b], frame.registers[out]);
  }
};

struct Library : Instruction {
  struct Result {
    size_t at;
    std::vector<int64_t> order, shape;
  };
  Object function;
  std::string name;
  fg::Wanted wanted;
  std::vector<double> settings;
  std::vector<int64_t> operands;
  std::vector<Result> results;

  explicit Library(PyObject *given)
      : function(attribute(given, "function")), name(PyUnicode_AsUTF8(attribute(given, "name"))), operands(integers(attribute(given, "operands"))) {
    const std::vector<Object> values = items(attribute(given, "given"));
    for (const Object &each : items(values.at(0))) wanted.emplace_back(integer(items(each).at(0)), dtype_of(items(each).at(1)));
    for (size_t n = 1; n < values.size(); ++n) settings.push_back(PyFloat_AsDouble(values[n]));
    if (PyErr_Occurred()) throw python_error();
    for (const Object &item : items(attribute(given, "results"))) {
      const std::vector<Object> parts = items(item);
      results.push_back({static_cast<size_t>(integer(parts.at(0))), integers(parts.at(1)), integers(parts.at(2))});
    }
  }

  // On CPUs, dropout and the gradient of a bias are used by the emulator only, and implemented in Python.
  bool needs_python(const std::vector<at::Tensor> &given) const {
    const bool needs_bias = std::any_of(wanted.begin(), wanted.end(), [](const auto &one) { return one.first == 3; });
    return name.rfind("attention", 0) == 0 && !given[0].is_cuda() && (settings[2] || needs_bias);
  }

  std::vector<at::Tensor> made(const std::vector<at::Tensor> &given) const {
    if (needs_python(given)) {
      const Object tensors = checked(PyList_AsTuple(list_of(given)));
      std::vector<at::Tensor> found;
      for (const Object &each : items(checked(PyObject_CallObject(function, tensors)))) found.push_back(unwrapped(each));
      return found;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    const WithoutGil other_threads_run;
    if (name == "attention") return fg::attention(wanted, settings, given);
    if (name == "attention_backward") return fg::attention_backward(wanted, settings, given);
    if (name == "topk") return fg::topk(wanted, settings[0], static_cast<int64_t>(settings[1]), given);
    const auto length = static_cast<int64_t>(settings[0]);
    return name == "last" ? fg::last(wanted, length, given) : fg::scatter_add(wanted, length, given);
  }

  void run(Frame &frame) override {
    const std::vector<at::Tensor> found = made(frame.at(operands));
    for (size_t n = 0; n < results.size(); ++n) {
      at::Tensor tensor = found.at(n);
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

struct Do : Instruction {
  PyObject *function;
  std::unique_ptr<Program> inside;  // set if the function consists of instructions
  std::vector<int64_t> tensors;

  explicit Do(PyObject *given);
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

  explicit Program(PyObject *given)
      : inputs(integer(given, "inputs")),
        results(integers(attribute(given, "results"))),
        pack_results(attribute(given, "pack_results")) {
    for (const Object &item : items(attribute(given, "held"))) held.push_back(item.get() == Py_None ? at::Tensor() : unwrapped(item));
    const Object index = attribute(given, "gpu");
    if (index.get() != Py_None) gpu = integer(index);
    const Object instructions = checked(PyImport_ImportModule("fusegen.runtime.instructions"));
    unreachable = attribute(instructions, "unreachable");
    if (gpu >= 0) stream_now = std::move(items(checked(PyObject_CallMethod(attribute(instructions, "cuda"), "queries", nullptr))).at(0));
    for (const Object &item : items(attribute(given, "body"))) body.push_back(instruction(item));
  }

  std::unique_ptr<Instruction> instruction(PyObject *given) const {
    const std::string kind = Py_TYPE(given)->tp_name;
    if (kind == "Allocate") return std::make_unique<Allocate>(given);
    if (kind == "View") return std::make_unique<View>(given);
    if (kind == "Release") return std::make_unique<Release>(given);
    if (kind == "MakeKey") return std::make_unique<Key>(given);
    if (kind == "LaunchKernel") return std::make_unique<Launch>(given, stream_now, unreachable);
    if (kind == "HostLaunch") return std::make_unique<HostLaunch>(given, unreachable);
    if (kind == "Product") return std::make_unique<Product>(given);
    if (kind == "Multiply") return std::make_unique<Multiply>(given);
    if (kind == "Library") return std::make_unique<Library>(given);
    if (kind == "Do") return std::make_unique<Do>(given);
    fail(PyExc_TypeError, kind);
  }

  void run(Frame &frame) {
    frame.registers.insert(frame.registers.end(), held.begin(), held.end());
    c10::OptionalDeviceGuard guard;
    if (gpu >= 0) guard.reset_device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
    for (const auto &each : body) each->run(frame);
  }

  Object found(const Frame &frame) const {
    if (pack_results == Py_None) return results.empty() ? Object(Py_NewRef(Py_None)) : wrapped(frame.registers[results[0]]);
    return checked(PyObject_CallOneArg(pack_results, list_of(frame.at(results))));
  }
};

Do::Do(PyObject *given) : function(attribute(given, "function")), tensors(integers(attribute(given, "tensors"))) {
  if (std::string(Py_TYPE(function)->tp_name) == "Instructions") inside = std::make_unique<Program>(function);
}

void Do::run(Frame &frame) {
  if (inside) {
    Frame own{frame.at(tensors), frame.scalars};
    return inside->run(own);
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
  const Object tensors = checked(PySequence_Fast(arguments[0], "tensors are a sequence"));
  if (PySequence_Fast_GET_SIZE(tensors.get()) != static_cast<Py_ssize_t>(self.program->inputs)) fail(PyExc_ValueError, "wrong number of tensors");
  if (!self.instructions) fail(PyExc_RuntimeError, "the executor is gone");
  Frame frame{{}, arguments[1]};
  frame.registers.reserve(self.program->inputs + self.program->held.size());
  for (size_t n = 0; n < self.program->inputs; ++n) frame.registers.push_back(unwrapped(PySequence_Fast_GET_ITEM(tensors.get(), n)));
  const bool is_donated = reinterpret_cast<PyObject *>(Py_TYPE(arguments[0])) == self.donated;
  if (is_donated && PyList_SetSlice(arguments[0], 0, PY_SSIZE_T_MAX, nullptr) < 0) throw python_error();
  self.program->run(frame);
  return self.program->found(frame).release();
  END_HANDLE_TH_ERRORS
}

// Executor(instructions)
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  PyObject *instructions;
  if (!PyArg_ParseTuple(arguments, "O", &instructions)) return nullptr;
  HANDLE_TH_ERRORS
  Object made = checked(type->tp_alloc(type, 0));
  auto *self = reinterpret_cast<Executor *>(made.get());
  self->call = call;
  self->instructions = Py_NewRef(instructions);
  self->donated = attribute(checked(PyImport_ImportModule("fusegen.runtime.instructions")), "Donated").release();
  self->program = new Program(instructions);
  return made.release();
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
