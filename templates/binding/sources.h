// Launches emitted kernels. Depends on the CUDA runtime only.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

namespace fg {

#include "sizes.h"
#include "workspace.h"

// A size or stride. Arithmetic on it throws if it overflows.
struct Size {
  int64_t value;
  operator int64_t() const { return value; }
};

template <class A, class B>
using SizeOf = std::enable_if_t<std::is_same_v<A, Size> || std::is_same_v<B, Size>, Size>;

inline Size checked(bool overflows, int64_t value) {
  if (overflows) throw std::domain_error("the sizes are too large");
  return {value};
}

template <class A, class B>
SizeOf<A, B> operator+(A a, B b) {
  int64_t sum;
  const bool overflows = __builtin_add_overflow(int64_t(a), int64_t(b), &sum);
  return checked(overflows, sum);
}

template <class A, class B>
SizeOf<A, B> operator-(A a, B b) {
  int64_t difference;
  const bool overflows = __builtin_sub_overflow(int64_t(a), int64_t(b), &difference);
  return checked(overflows, difference);
}

template <class A, class B>
SizeOf<A, B> operator*(A a, B b) {
  int64_t product;
  const bool overflows = __builtin_mul_overflow(int64_t(a), int64_t(b), &product);
  return checked(overflows, product);
}

inline Size operator-(Size a) { return int64_t(0) - a; }

template <class A, class B>
SizeOf<A, B> quotient(A a, B b) { return {quotient(int64_t(a), int64_t(b))}; }

template <class A, class B>
SizeOf<A, B> remainder(A a, B b) { return {remainder(int64_t(a), int64_t(b))}; }

template <class A, class B>
SizeOf<A, B> least(A a, B b) { return {least(int64_t(a), int64_t(b))}; }

#include "tensor_map.h"

inline cudaError_t tensor_map(TensorMap& map, int64_t address, int kind, int64_t bytes, std::vector<int64_t> shape,
                              std::vector<int64_t> strides, std::vector<uint32_t> box) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || !encode) return status == cudaSuccess ? cudaErrorNotSupported : status;
  const int refused = encoded(reinterpret_cast<Encode>(encode), map, address, kind, bytes, shape, strides, box);
  return refused ? cudaErrorInvalidValue : cudaSuccess;
}

// No tensor is empty, so that none is null.
inline bool lies_at(const void* address, uintptr_t alignment) {
  return address && reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

constexpr int64_t kCounters = 1 << 16;

// Sets the number of the counter of a stream, or of its capture, as in `fusegen/runtime/cuda.py`.
inline cudaError_t counter_of(int64_t& number, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::tuple<int, cudaStream_t, const void*, unsigned long long>, int64_t> numbers;
  static thread_local char own = 0;  // each thread has a default stream of its own behind one handle
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
  if (!stream) stream = cudaStreamPerThread;
#endif
  if (stream == cudaStreamLegacy) stream = nullptr;  // cannot be captured
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device)) return status;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (stream) {
    if (const cudaError_t status = cudaStreamGetCaptureInfo(stream, &capturing, &capture)) return status;
  }
  if (capturing == cudaStreamCaptureStatusNone) capture = 0;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(device, stream, stream == cudaStreamPerThread ? &own : nullptr, capture);
  number = numbers.emplace(key, static_cast<int64_t>(numbers.size())).first->second;
  return number < kCounters ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

// Launches a kernel. `overlaps`: programmatic dependent launch; it may start while the previous kernel still runs.
inline cudaError_t launch(const void* kernel, int64_t grid, unsigned block, size_t shared_bytes, int cluster, void** arguments,
                          cudaStream_t stream, bool overlaps) {
  if (!grid) return cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  if (cluster > 8) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace fg

#include "numbers.h"
