// The runtime of every extension: sizes, memory, matmuls, launches. It includes no CUDA header, so that one build serves machines
// with and without a GPU; the CUDA driver is loaded at the first launch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/library.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>

#include "library.h"
#include "portable.h"

namespace {
namespace fg {

using Tensors = std::vector<at::Tensor>;

#include "sizes.h"

// Guards of programs.

inline bool lies_at(const at::Tensor& tensor, int64_t alignment, std::initializer_list<int64_t> free) {
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  int64_t bits = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  for (int64_t dim : free) bits |= tensor.stride(dim) * bytes;
  return bits % alignment == 0;
}

inline bool one_twice(const Tensors& tensors) {
  for (size_t one = 0; one < tensors.size(); ++one) {
    for (size_t other = 0; other < one; ++other) {
      if (tensors[one].is_same(tensors[other])) return true;
    }
  }
  return false;
}

// Memory.

inline at::Tensor fresh(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  return at::empty(shape, at::TensorOptions().dtype(dtype).device(device));
}

#include "workspace.h"

constexpr int64_t kApart = 16 << 20;  // bytes from which a value has its own allocation; as in `fusegen/program/call.py`

inline bool is_apart(const Slot& slot) { return slot.size >= kApart; }

// Allocates the workspace of the smaller values, and sets their offsets.
inline at::Tensor workspace(std::vector<Slot>& slots, at::Device device) {
  std::vector<Slot> within;
  std::copy_if(slots.begin(), slots.end(), std::back_inserter(within), [](const Slot& slot) { return !is_apart(slot); });
  const int64_t bytes = arrange(within);
  auto found = within.begin();
  for (Slot& slot : slots) {
    if (!is_apart(slot)) slot = *found++;
  }
  return fresh({bytes}, at::kByte, device);
}

inline at::Tensor part(const at::Tensor& workspace, const Slot& slot, at::IntArrayRef shape, at::ScalarType dtype) {
  return workspace.narrow(0, slot.offset, slot.size).view(dtype).view(shape);
}

inline int64_t address(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.data_ptr()); }

inline at::Tensor view(const at::Tensor& base, at::IntArrayRef shape, at::IntArrayRef strides, int64_t offset) {
  return base.as_strided(shape, strides, base.storage_offset() + offset);
}

// Keys of random bits.

inline at::Tensor drawn_key(at::Device device) { return fresh({1}, at::kLong, device).random_(); }

inline at::Tensor key_of(int64_t number, at::Device device) {
  return at::full({1}, number, at::TensorOptions().dtype(at::kLong).device(device));
}

// In-place writes.

// Returns the bytes of a row at a given pitch; -1 if the layout does not consist of such rows.
inline int64_t width(const at::Tensor& tensor, int64_t pitch) {
  int64_t bytes = tensor.element_size();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t stride = tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
    if (tensor.size(dim) < 2) continue;
    if (stride < pitch) {
      bytes += (tensor.size(dim) - 1) * stride;
    } else if (stride % pitch) {
      return -1;
    }
  }
  return bytes;
}

// Returns true if two tensors may share an element. Disjoint ranges and disjoint columns of one matrix do not.
inline bool overlap(const at::Tensor& one, const at::Tensor& other) {
  if (!one.numel() || !other.numel()) return false;
  const int64_t distance = address(other) - address(one);
  const int64_t sizes[] = {static_cast<int64_t>(one.element_size()), static_cast<int64_t>(other.element_size())};
  if (distance >= elements(one) * sizes[0] || -distance >= elements(other) * sizes[1]) return false;
  for (const at::Tensor* tensor : {&one, &other}) {
    for (int64_t dim = 0; dim < tensor->dim(); ++dim) {
      const int64_t pitch = tensor->stride(dim) * static_cast<int64_t>(tensor->element_size());
      if (tensor->size(dim) < 2 || !pitch) continue;
      const int64_t widths[] = {width(one, pitch), width(other, pitch)}, between = (distance % pitch + pitch) % pitch;
      if (widths[0] >= 0 && widths[1] >= 0 && widths[0] <= between && between + widths[1] <= pitch) return false;
    }
  }
  return true;
}

inline void check_apart(at::ArrayRef<const char*> names, const Tensors& tensors, size_t place) {
  const at::Tensor& written = tensors[place];
  for (int64_t dim = 0; dim < written.dim(); ++dim) {
    TORCH_CHECK_TYPE(written.stride(dim) || written.size(dim) < 2, "'", names[place], "' is written to, but several of its ",
                     "elements share one memory location, as after expand()\n  try: pass ", names[place], ".clone()");
  }
  for (size_t other = 0; other < tensors.size(); ++other) {
    TORCH_CHECK_TYPE(other == place || !overlap(written, tensors[other]), "'", names[place], "' is written to, but shares memory ",
                     "with '", names[other], "'\n  try: pass ", names[other], ".clone(), or declare one parameter for both");
  }
}

inline void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// CPU kernels: the entry point takes packed arguments of 8 bytes each.

union Word {
  int64_t integer;
  double real;
  Word(int64_t value) : integer(value) {}
  Word(double value) : real(value) {}
};

using Named = std::vector<std::pair<const char*, int64_t>>;

// Raises an IndexError. The range at the end of the message names sizes, which are replaced by their values in this call.
[[noreturn]] inline void out_of_range(const std::string& message, const Named& sizes) {
  const size_t bracket = message.rfind('[');
  std::string text = message.substr(0, bracket), word;
  for (char letter : bracket == std::string::npos ? std::string() : message.substr(bracket)) {
    if (std::isalnum(static_cast<unsigned char>(letter)) || letter == '_') {
      word += letter;
      continue;
    }
    for (const auto& [name, value] : sizes) {
      if (word == name) word = std::to_string(value);
    }
    text += word + letter;
    word.clear();
  }
  TORCH_CHECK_INDEX(false, text + word, "\n  try: check the values that are used as indices");
}

// The CUDA driver, with structures and constants of cuda.h.

struct LaunchAttribute {
  unsigned number;
  unsigned gap;
  int value;
  unsigned char rest[60];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

#include "tensor_map.h"

struct Driver {
  int (*launch)(const LaunchConfig*, void*, void**, void**);
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*kernel)(void**, void*, const char*);
  int (*set)(int, int, void*, int);
  Encode encode;
  int (*name)(int, const char**);
  int (*text)(int, const char**);
  int (*ask)(int*, int, int);
  int (*retain)(void**, int);
  int (*make_current)(void*);
  int (*capture)(void*, int*, unsigned long long*, void*, void*, void*);
  int (*stream)(int32_t, void**);  // torch's current stream
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(function_in(library, name));
  TORCH_CHECK(function, "the CUDA driver has no function ", name, "\n  try: install NVIDIA's driver for CUDA 12 or later");
}

inline const Driver& driver() {
  static const Driver found = [] {
    Driver made;
    void* library = cuda_library();
    TORCH_CHECK(library, "the CUDA driver cannot be used: ", loading_error(), "\n  try: install NVIDIA's driver for CUDA 12 or later");
    find(library, "cuLaunchKernelEx", made.launch);
    find(library, "cuLibraryLoadData", made.load);
    find(library, "cuLibraryGetKernel", made.kernel);
    find(library, "cuKernelSetAttribute", made.set);
    find(library, "cuTensorMapEncodeTiled", made.encode);
    find(library, "cuGetErrorName", made.name);
    find(library, "cuGetErrorString", made.text);
    find(library, "cuDeviceGetAttribute", made.ask);
    find(library, "cuDevicePrimaryCtxRetain", made.retain);
    find(library, "cuCtxSetCurrent", made.make_current);
    find(library, "cuStreamGetCaptureInfo_v2", made.capture);
    void* torch = torch_cuda_library();
    TORCH_CHECK(torch, "a tensor is on a GPU, but libtorch_cuda.so is not loaded\n  try: import torch with CUDA support first");
    find(torch, "aoti_torch_get_current_cuda_stream", made.stream);
    return made;
  }();
  return found;
}

inline void check(int status, const std::string& what) {
  if (!status) return;
  const char *name = "", *text = "";
  driver().name(status, &name);
  driver().text(status, &text);
  TORCH_CHECK(false, what, ": ", name, ": ", text);
}

inline int attribute(int device, int number) {
  int value = 0;
  check(driver().ask(&value, number, device), "the driver cannot query the device");
  return value;
}

inline int capability(int device) {  // compute capability, such as 90
  static std::mutex mutex;
  static std::map<int, int> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) found = known.emplace(device, attribute(device, 75) * 10 + attribute(device, 76)).first;
  return found->second;
}

inline void* current_stream(int device) {
  void* stream = nullptr;
  TORCH_CHECK(!driver().stream(device, &stream), "torch has no current stream for device ", std::to_string(device));
  return stream;
}

constexpr int64_t kCounters = 1 << 16;

// The number of the counter of a stream, or of its capture, as in `fusegen/runtime/cuda.py`.
inline int64_t counter_of(int device, void* stream) {
  static std::mutex mutex;
  static std::map<std::tuple<int, void*, unsigned long long>, int64_t> numbers;
  int is_capturing = 0;
  unsigned long long capture = 0;
  if (stream) check(driver().capture(stream, &is_capturing, &capture, nullptr, nullptr, nullptr), "the driver cannot query the capture");
  std::lock_guard<std::mutex> lock(mutex);
  const auto added = numbers.emplace(std::make_tuple(device, stream, is_capturing ? capture : 0), static_cast<int64_t>(numbers.size()));
  TORCH_CHECK(added.first->second < kCounters, "the process has captured more than ", std::to_string(kCounters), " CUDA graphs with ",
              "kernels whose blocks wait for each other\n  try: start a new process");
  return added.first->second;
}

// A GPU kernel. It is loaded on a device at its first launch there.
struct Kernel {
  const unsigned char* cubin;
  const char* entry;
  int shared_bytes, cluster;
  std::mutex mutex{};
  std::array<std::atomic<void*>, 64> handles{};

  void* on(int device) {
    if (void* handle = handles[device].load(std::memory_order_acquire)) return handle;
    std::lock_guard<std::mutex> lock(mutex);
    if (!handles[device].load(std::memory_order_relaxed)) {
      void *library = nullptr, *handle = nullptr;
      check(driver().load(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0), std::string("the driver cannot load ") + entry);
      check(driver().kernel(&handle, library, entry), std::string("the driver cannot load ") + entry);
      if (shared_bytes > 48 * 1024) {
        check(driver().set(8, shared_bytes, handle, device),
              "the device refuses " + std::to_string(shared_bytes) + " bytes of shared memory per block");
      }
      if (cluster > 8) {
        check(driver().set(14, 1, handle, device), "the device refuses clusters of " + std::to_string(cluster) + " blocks");
      }
      handles[device].store(handle, std::memory_order_release);
    }
    return handles[device];
  }
};

constexpr int kNoContext = 201;  // CUDA_ERROR_INVALID_CONTEXT: a new thread, such as one of autograd, has no context

inline void make_current(int device) {
  void* context = nullptr;
  check(driver().retain(&context, device), "the driver cannot make the context of the device current");
  check(driver().make_current(context), "the driver cannot make the context of the device current");
}

inline void launch(Kernel& kernel, int device, int64_t grid, unsigned block, void** arguments, void* stream, bool overlaps) {
  if (!grid) return;
  TORCH_CHECK(grid <= INT32_MAX, kernel.entry, " needs ", std::to_string(grid), " blocks, but a launch has at most ",
              std::to_string(INT32_MAX), "\n  try: split the tensors, and call the kernel on each part");
  LaunchAttribute early{6, 0, 1, {}};  // programmatic dependent launch (PDL)
  const LaunchConfig config{{static_cast<unsigned>(grid), 1, 1}, {block, 1, 1}, static_cast<unsigned>(kernel.shared_bytes),
                            stream, overlaps ? &early : nullptr, overlaps ? 1u : 0u};
  void* handle = kernel.on(device);
  int status = driver().launch(&config, handle, arguments, nullptr);
  if (status == kNoContext) {
    make_current(device);
    status = driver().launch(&config, handle, arguments, nullptr);
  }
  check(status, std::string("the driver cannot launch ") + kernel.entry);
}

inline TensorMap tensor_map(int device, int64_t address, int kind, int64_t bytes, std::vector<int64_t> shape, std::vector<int64_t> strides,
                            std::vector<uint32_t> box) {
  TensorMap map;
  int status = encoded(driver().encode, map, address, kind, bytes, shape, strides, box);
  if (status == kNoContext) {
    make_current(device);
    status = encoded(driver().encode, map, address, kind, bytes, shape, strides, box);
  }
  check(status, "the driver cannot encode the TMA tensor map");
  return map;
}

}  // namespace fg
}  // namespace
