"""A CUDA driver that launches nothing and notes what it was given: compiled by the host's compiler, called as the real one is."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusegen.jit.host import compile_shared
from fusegen.runtime.cuda import Driver, LoadedKernel
from fusegen.settings import cache_folder

_MOST_BYTES = 1024
_KEPT: list[Any] = []  # what kernels' handles are the addresses of
_ATTRIBUTE_BYTES = 72

# The declarations follow cuda.h. A kernel's handle is the address of the sizes of its parameters, behind their number: the driver
# knows these from the kernel's image.
_TEXT = """
#include <atomic>
#include <cstring>
#include <unistd.h>

struct Attribute {
  int id;
  char pad[4], value[64];
};
struct LaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void* hStream;
  Attribute* attrs;
  unsigned numAttrs;
};
struct Noted {
  unsigned long long dims[7], stream, attributes, attribute_count, function, extra;
  Attribute attribute;
  long long bytes;
  unsigned char arguments[1024];
};
extern "C" {
Noted stub_noted[4096];
std::atomic<int> stub_count;
int stub_status, stub_refusals, stub_pause, stub_libraries, stub_attributes;
unsigned long long stub_given[32], stub_capture;

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
  if (stub_refusals > 0) { --stub_refusals; return stub_status; }
  Noted& to = stub_noted[stub_count++];
  const long long* sizes = static_cast<long long*>(function);
  if (stub_pause) usleep(stub_pause);  // another thread may run before anything is read
  const unsigned dims[7] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                            config->blockDimZ, config->sharedMemBytes};
  for (int i = 0; i < 7; ++i) to.dims[i] = dims[i];
  to.stream = reinterpret_cast<unsigned long long>(config->hStream);
  to.attributes = reinterpret_cast<unsigned long long>(config->attrs);
  to.attribute_count = config->numAttrs;
  to.attribute = config->numAttrs ? config->attrs[0] : Attribute{};
  to.function = reinterpret_cast<unsigned long long>(function);
  to.extra = reinterpret_cast<unsigned long long>(extra);
  to.bytes = 0;
  for (long long i = 0; i < sizes[0]; ++i) {
    std::memcpy(to.arguments + to.bytes, arguments[i], sizes[i + 1]);
    to.bytes += sizes[i + 1];
  }
  return 0;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const unsigned long long* shape,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if (stub_refusals > 0) { --stub_refusals; return stub_status; }
  unsigned long long* next = stub_given;
  const unsigned long long first[4] = {reinterpret_cast<unsigned long long>(map) % 128, static_cast<unsigned long long>(type),
                                       rank, reinterpret_cast<unsigned long long>(address)};
  for (unsigned long long value : first) *next++ = value;
  for (unsigned i = 0; i < rank; ++i) *next++ = shape[i];
  for (unsigned i = 0; i + 1 < rank; ++i) *next++ = strides[i];
  for (unsigned i = 0; i < rank; ++i) *next++ = box[i];
  for (unsigned i = 0; i < rank; ++i) *next++ = steps[i];
  const int last[4] = {interleave, swizzle, promotion, fill};
  for (int value : last) *next++ = value;
  std::memset(map, 0xab, 128);
  std::memcpy(map, &address, 8);
  return 0;
}

int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (stub_refusals > 0) { --stub_refusals; return stub_status; }
  ++stub_libraries;
  *library = const_cast<void*>(code);
  return 0;
}

int cuLibraryUnload(void*) {
  --stub_libraries;
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  if (std::strcmp(name, "fg_missing") == 0) return 500;
  *kernel = library;
  return 0;
}

int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  if (stub_refusals > 0) { --stub_refusals; return stub_status; }
  const unsigned long long asked[4] = {static_cast<unsigned long long>(attribute), static_cast<unsigned long long>(value),
                                       reinterpret_cast<unsigned long long>(kernel), static_cast<unsigned long long>(device)};
  std::memcpy(stub_given + 4 * stub_attributes++, asked, sizeof asked);
  return 0;
}

int cuStreamGetCaptureInfo_v2(void*, int* is_capturing, unsigned long long* number, void*, void*, void*) {
  *is_capturing = stub_capture != 0;
  *number = stub_capture;
  return 0;
}

int cuGetErrorName(int status, const char** text) {
  *text = status == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : status == 710 ? "CUDA_ERROR_ASSERT" : nullptr;
  return *text ? 0 : 1;
}

int cuGetErrorString(int status, const char** text) {
  *text = status == 701 ? "too many resources requested for launch" : nullptr;
  return *text ? 0 : 1;
}
}
"""


class _Noted(ctypes.Structure):
    _fields_ = (
        ("dims", ctypes.c_uint64 * 7),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("attribute_count", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("extra", ctypes.c_uint64),
        ("attribute", ctypes.c_ubyte * _ATTRIBUTE_BYTES),
        ("bytes", ctypes.c_int64),
        ("arguments", ctypes.c_ubyte * _MOST_BYTES),
    )


@dataclass(frozen=True)
class Launched:
    """What a launch was given.

    Attributes:
        grid, block, shared_bytes, stream: as the driver reads them.
        rest: attributes, their number, and what goes on behind the arguments.
        attribute: all bytes of the first one; zeros where there is none.
        function: the kernel's handle.
        arguments: all bytes of all parameters.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    rest: tuple[int, ...]
    attribute: bytes
    function: int
    arguments: bytes

    def read(self, spelled: str) -> tuple[Any, ...]:
        """The arguments, as `struct` spells them."""
        return struct.unpack(f"={spelled}", self.arguments)


class StubDriver(Driver):
    """The driver, with what it noted."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compile_shared(_TEXT, ("-std=c++17", "-O1"), cache_folder("cpu"))))
        super().__init__(library)
        self._number = ctypes.c_int.in_dll(library, "stub_count")
        self._noted = (_Noted * 4096).in_dll(library, "stub_noted")
        self._number.value = 0
        self.capture = ctypes.c_uint64.in_dll(library, "stub_capture")
        self.capture.value = 0
        ctypes.c_int.in_dll(library, "stub_attributes").value = 0
        self.refuse(0, 0)
        self.pause(0)

    @property
    def launched(self) -> list[Launched]:
        """All launches, in order."""
        return [
            Launched(
                tuple(one.dims[:3]),
                tuple(one.dims[3:6]),
                one.dims[6],
                one.stream,
                (one.attributes, one.attribute_count, one.extra),
                bytes(one.attribute),
                one.function,
                bytes(one.arguments[: one.bytes]),
            )
            for one in self._noted[: self._number.value]
        ]

    @property
    def libraries(self) -> int:
        """The number of loaded binaries."""
        return ctypes.c_int.in_dll(self._library, "stub_libraries").value

    @property
    def map_arguments(self) -> list[int]:
        """What the last tensor map was made of, behind where it was to lie within 128 bytes."""
        return list((ctypes.c_uint64 * 32).in_dll(self._library, "stub_given"))

    def refuse(self, status: int, times: int) -> None:
        """The next calls give this status, and do nothing."""
        ctypes.c_int.in_dll(self._library, "stub_status").value = status
        ctypes.c_int.in_dll(self._library, "stub_refusals").value = times

    def pause(self, microseconds: int) -> None:
        """Before it reads anything, a launch waits for so long from now on."""
        ctypes.c_int.in_dll(self._library, "stub_pause").value = microseconds


def loaded(entry: str, sizes: Sequence[int]) -> LoadedKernel:
    """A kernel with parameters of these sizes, in bytes."""
    kept = (ctypes.c_int64 * (len(sizes) + 1))(len(sizes), *sizes)
    _KEPT.append(kept)
    return LoadedKernel(entry, ctypes.addressof(kept))
