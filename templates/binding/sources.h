// What launching emitted kernels takes beside them: CUDA's runtime, and no library.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

namespace fg {

// Sizes: quotients and remainders of what is not negative; whatever is divided by 0 is 0.

inline int64_t quotient(int64_t value, int64_t divisor) { return divisor ? value / divisor : 0; }
inline int64_t remainder(int64_t value, int64_t divisor) { return divisor ? value % divisor : 0; }
inline int64_t least(int64_t one, int64_t other) { return std::min(one, other); }

inline int64_t integer(double value) {
  return value >= -9223372036854775808.0 && value < 9223372036854775808.0 ? static_cast<int64_t>(value) : INT64_MIN;
}
inline int64_t integer(int64_t value) { return value; }

#include "workspace.h"

// The tensor map of a view whose lines of 128 bytes are swizzled: the driver makes it, by the numbers of its `cuda.h`.

struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

inline cudaError_t tensor_map(TensorMap& map, int64_t base, int64_t offset, int kind, int64_t bytes, std::vector<int64_t> shape,
                              std::vector<int64_t> strides, std::vector<uint32_t> box, bool promote) {
  using Encode = int (*)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int,
                         int, int);
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || !encode) return status == cudaSuccess ? cudaErrorNotSupported : status;
  const size_t rank = shape.size();
  std::vector<uint64_t> extents(shape.rbegin(), shape.rend()), apart;
  for (size_t dim = rank - 1; dim-- > 0;) apart.push_back(strides[dim] * bytes);
  apart.resize(std::max<size_t>(rank - 1, 1));
  std::reverse(box.begin(), box.end());
  const std::vector<uint32_t> steps(rank, 1);
  const int refused = reinterpret_cast<Encode>(encode)(&map, kind, static_cast<unsigned>(rank),
                                                       reinterpret_cast<void*>(base + offset * bytes), extents.data(), apart.data(),
                                                       box.data(), steps.data(), 0, 3, promote ? 3 : 0, 0);
  return refused ? cudaErrorInvalidValue : cudaSuccess;
}

// Launches a kernel; `overlaps`: it starts when all blocks of the one before it have ended, or said that it may.
inline cudaError_t launch(const void* kernel, int64_t grid, unsigned block, size_t shared_bytes, int cluster, void** arguments,
                          cudaStream_t stream, bool overlaps) {
  if (!grid) return cudaSuccess;
  if (grid > INT32_MAX) return cudaErrorInvalidConfiguration;
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
