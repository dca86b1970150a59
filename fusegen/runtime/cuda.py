"""Launches on a CUDA device: loaded kernels, streams, tensor maps. Only this file touches a GPU."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from fusegen.dtypes import DType
from fusegen.errors import LaunchError
from fusegen.program.call import KernelLaunch
from fusegen.target import PORTABLE_CLUSTER

# The CUDA driver's own functions: launches and tensor maps, with arguments that are laid out before the call.
#
# A launch asks ctypes to convert nothing: it passes addresses of memory that is filled by one ``struct`` beforehand.


_ALIGNMENT = 128  # bytes: of a CUtensorMap, as CUDA 13 declares it; CUDA 12 wants half of that
_MAP_BYTES = 128
_MOST_BLOCKS = (1 << 31) - 1  # of a grid's first dim

MAP = f"{_MAP_BYTES}s"
ADDRESS, INTEGER, REAL = "Q", "q", "d"
"""Kinds of arguments, as `struct` spells them."""

ParameterKind: TypeAlias = str
Frame: TypeAlias = tuple[Any, Any, Any]
"""Memory of one launch under way, and the addresses of its configuration and of its table of arguments, ready to be passed."""


class Driver:
    """The functions.

    Args:
        library: the driver's, which nobody else sets types of arguments on.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launch = library.cuLaunchKernelEx  # without types: ctypes would convert each argument again

    def encode(self, device: int, *arguments: Any) -> bytes:
        """A tensor map.

        Args:
            device: the index.
            arguments: what ``cuTensorMapEncodeTiled`` takes behind the place of its result.

        Raises:
            LaunchError: the driver refuses them.
        """
        place = _aligned(_MAP_BYTES)
        status = self._library.cuTensorMapEncodeTiled(place, *arguments)
        if status == _INVALID_CONTEXT:  # the device has not met this thread, as it has not autograd's at first
            make_current(device)
            status = self._library.cuTensorMapEncodeTiled(place, *arguments)
        if status:
            raise LaunchError(f"the driver makes no tensor map: {self.described(status)}", hint=_REPORT)
        return bytes(place)

    def described(self, status: int) -> str:
        """A status in the driver's own words."""
        found = ctypes.c_char_p(), ctypes.c_char_p()
        for ask, text in zip((self._library.cuGetErrorName, self._library.cuGetErrorString), found, strict=True):
            ask(status, ctypes.byref(text))
        return ": ".join(text.value.decode() for text in found if text.value) or f"error {status}"


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        LaunchError: there is none.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return Driver(ctypes.CDLL(name))
    except (OSError, AttributeError) as error:
        raise LaunchError(
            f"the CUDA driver cannot be used: {error}", hint="install NVIDIA's driver for CUDA 12 or later"
        ) from error


def make_current(index: int) -> None:
    """Makes a device's context the current one of this thread: that of torch, which may not have met the thread yet."""
    from cuda.core import Device

    Device(index).set_current()


# Launches.


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that is loaded on a device.

    Attributes:
        handle: a ``CUkernel``, which the driver launches as it does a ``CUfunction``.
        owner: with whose life the handle ends.
    """

    entry: str
    handle: int
    owner: Any = None


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` of the driver: a number and a value, of which the first four bytes are used here."""

    _fields_ = (("number", ctypes.c_uint), ("gap", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_ubyte * 60))


OVERLAPS = LaunchAttribute(number=6, value=1)
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``: the kernel starts when all blocks of the one before it in the stream
have ended, or said that it may. What they wrote need not be visible then; ``griddepcontrol.wait`` waits for that."""


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of the driver, which ends with its attributes: there are none, or one."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchSite:
    """One launch of a call: what all calls have in common, and frames for what they have not.

    A frame belongs to one launch at a time, from its filling until the driver has copied the arguments, which is before it returns:
    other threads, and signal handlers of this one, may be in the call as well. So a frame is taken from a list, whose ends Python
    moves in one step, and put back.

    Args:
        kernel: what is launched.
        device: where.
        grid: number of blocks.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: of each parameter its kind, or its value where that is the same in all calls.
        overlaps: whether it starts while the launch before it still runs.

    Attributes:
        device, grid, block, shared_bytes, overlaps: as given.
        handle: of the kernel.
        function: the address of `launch`.
        launch: the driver's function, of a frame's configuration, `kernel`, a frame's table, and nothing.
        kernel: the kernel, ready to be passed.
        fill: writes a stream, `attributes` and the arguments that have a kind into the memory of a frame, at `start`.
        attributes: where they are and how many; nothing where there are none.
        start: where.
        frames: those that no launch uses.

    Raises:
        LaunchError: no device has so many blocks.
    """

    start = LaunchConfig.stream.offset

    def __init__(
        self,
        kernel: LoadedKernel,
        device: int,
        grid: int,
        block: int,
        shared_bytes: int,
        arguments: Sequence[ParameterKind | int],
        *,
        overlaps: bool = False,
    ) -> None:
        if grid > _MOST_BLOCKS:
            what = f"{kernel.entry} needs {grid} blocks, and a launch has {_MOST_BLOCKS} at most"
            raise LaunchError(what, hint="call the kernel on parts of its tensors")
        self.device, self.grid, self.block, self.shared_bytes, self.overlaps = device, grid, block, shared_bytes, overlaps
        self._loaded, self._driver, self.handle = kernel, driver(), kernel.handle
        self._config = LaunchConfig((grid, 1, 1), (block, 1, 1), shared_bytes)
        self.launch, self.kernel = self._driver.launch, ctypes.c_void_p.from_param(kernel.handle)
        self.function = ctypes.cast(self.launch, ctypes.c_void_p).value
        self.frames: list[Frame] = []
        self.attributes = (ctypes.addressof(OVERLAPS), 1) if overlaps else ()
        self._lay_out(arguments)

    def _lay_out(self, arguments: Sequence[ParameterKind | int]) -> None:
        """Values that are filled in stand in one piece: the stream, the attributes or zeros, what has a kind; then the rest."""
        head, behind = f"={ADDRESS}{ADDRESS}I" if self.attributes else f"={ADDRESS}", ctypes.sizeof(LaunchConfig)
        spelled, places = f"{head}{behind - self.start - struct.calcsize(head)}x", dict[int, int]()
        for number, kind in enumerate(arguments):
            if isinstance(kind, str):
                gap = -behind % _ALIGNMENT if kind == MAP else 0
                spelled, places[number] = f"{spelled}{gap}x{kind}", behind + gap
                behind += gap + struct.calcsize(kind)
        self.fill = struct.Struct(spelled).pack_into
        self._constants = [(number, value) for number, value in enumerate(arguments) if isinstance(value, int)]
        places |= {number: behind + 8 * place for place, (number, _) in enumerate(self._constants)}
        self._constants_at, self._table_at = behind, behind + 8 * len(self._constants)
        self._places = [places[number] for number in range(len(arguments))]

    def frame(self) -> Frame:
        """Another frame."""
        memory = _aligned(self._table_at + 8 * len(self._places))
        ctypes.memmove(memory, ctypes.byref(self._config), ctypes.sizeof(LaunchConfig))
        struct.pack_into(f"={len(self._constants)}q", memory, self._constants_at, *(value for _, value in self._constants))
        table = [ctypes.addressof(memory) + place for place in self._places]
        struct.pack_into(f"={len(table)}Q", memory, self._table_at, *table)
        return memory, ctypes.byref(memory), ctypes.byref(memory, self._table_at)

    def __call__(self, stream: int, given: Sequence[Any]) -> None:
        """Launches the kernel.

        Args:
            given: the arguments that have a kind.

        Raises:
            LaunchError: the driver refuses it.
        """
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = self.frame()
        memory, config, table = frame
        self.fill(memory, self.start, stream, *self.attributes, *given)
        status = self.launch(config, self.kernel, table, None)
        if status:
            self.refused(status, frame)
        self.frames.append(frame)

    def refused(self, status: int, frame: Frame) -> None:
        """Handles a launch that the driver refused: by another one, where the thread only had no context yet.

        Raises:
            LaunchError: it has, or that does not help.
        """
        if self.made_current(status):
            status = self.launch(frame[1], self.kernel, frame[2], None)
        if status:
            self.refuse(status)

    def made_current(self, status: int) -> bool:
        """Tells if a launch is worth another try: the thread had no context, and has it now."""
        if status == _INVALID_CONTEXT:
            make_current(self.device)
        return status == _INVALID_CONTEXT

    def refuse(self, status: int) -> None:
        """Says that the driver refused a launch.

        Raises:
            LaunchError: always.
        """
        what = f"the driver does not launch {self._loaded.entry}: {self._driver.described(status)}"
        raise LaunchError(what, hint=_hint(status))


def _aligned(size: int) -> Any:
    """Zeroed memory whose address every argument can have."""
    whole = ctypes.create_string_buffer(size + _ALIGNMENT)
    return (ctypes.c_char * size).from_buffer(whole, -ctypes.addressof(whole) % _ALIGNMENT)


# Statuses, by their numbers in cuda.h.

_OUT_OF_MEMORY, _INVALID_CONTEXT, _OUT_OF_RESOURCES = 2, 201, 701
_LEFT_BY_ANOTHER = (700, 702, 710, *range(714, 720))  # a kernel before this one faulted, asserted or ran too long
_OF_CAPTURES = range(900, 909)

_REPORT = "report it, with what `fusegen doctor` says"


def _hint(status: int) -> str:
    if status in _LEFT_BY_ANOTHER:
        return "look at what ran before: the device tells late of it; CUDA_LAUNCH_BLOCKING=1 names the call, in a new process"
    if status in _OF_CAPTURES:
        return "look at what else is captured: the graph that this call was to become part of cannot take it"
    if status == _OUT_OF_MEMORY:
        return "free memory of the device: the driver needs some of its own"
    return _REPORT


# Tensor maps.


def encoded(
    dtype: DType,
    device: int,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    promote: bool,
) -> bytes:
    """The tensor map of a view whose lines of 128 bytes are swizzled.

    Args:
        dtype: of the elements.
        device: the index.
        address: of the first one.
        shape, strides: of the view, in elements, outermost dim first.
        box: the tile.
        promote: whether reads should bring whole lines of L2.

    Raises:
        LaunchError: the driver refuses it.
    """
    from cuda.bindings import driver as names  # NVIDIA's numbers of what follows

    types = {
        DType.BFLOAT16: names.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType.FLOAT16: names.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType.FLOAT32: names.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    promotions = names.CUtensorMapL2promotion
    rank = len(shape)
    bytes_apart = [stride * dtype.itemsize for stride in strides[-2::-1]] if rank > 1 else []
    return driver().encode(
        device,
        int(types[dtype]),
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape[::-1]),  # the driver counts dims from the innermost one outwards
        (ctypes.c_uint64 * max(rank - 1, 1))(*bytes_apart),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(names.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(names.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B if promote else promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE),
        int(names.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )


# Loaded kernels.


_SHARED_WITHOUT_REQUEST = 48 * 1024  # bytes of dynamic shared memory that a kernel gets without asking


def load(cubin: bytes, name: str, entry: str, launch: KernelLaunch, device: int) -> LoadedKernel:
    """A kernel that is loaded on a device.

    Args:
        cubin: the machine code.
        name: of the kernel, for debuggers.
        launch: says what its launches ask for: dynamic shared memory, and blocks of a cluster.
        device: the index.

    Raises:
        LaunchError: the driver refuses the machine code, or the device what it asks for.
    """
    from cuda.core import Device, ObjectCode

    with torch.cuda.device(device):  # the caller's current device is current again afterwards
        Device(device).set_current()
        try:
            kernel = ObjectCode.from_cubin(cubin, name=name).get_kernel(entry)
        except Exception as error:
            raise LaunchError(f"the driver cannot load {entry}: {error}") from error
        request(kernel, launch, device)
    return LoadedKernel(entry, int(kernel.handle), kernel)


def request(kernel: Any, launch: KernelLaunch, device: int) -> None:
    """Asks for what no kernel gets without asking.

    Raises:
        LaunchError: the device refuses it.
    """
    if launch.shared_bytes > _SHARED_WITHOUT_REQUEST:
        what = f"{launch.shared_bytes} bytes of shared memory a block"
        _request(kernel, "MAX_DYNAMIC_SHARED_SIZE_BYTES", launch.shared_bytes, device, what)
    if launch.cluster > PORTABLE_CLUSTER:
        _request(kernel, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1, device, f"clusters of {launch.cluster} blocks")


def _request(kernel: Any, attribute: str, value: int, device: int, what: str) -> None:
    from cuda.bindings import driver

    number = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
    (status,) = driver.cuKernelSetAttribute(number, value, kernel.handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the device refuses {what}: {status.name}")


def queries() -> tuple[Callable[[int], int], Callable[[], int]]:
    """torch's own functions that give the handle of the stream that it would use now on a device, and the index of its current
    device: a tenth of a microsecond, against three and a half for ``torch.cuda.current_stream``."""
    return torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice


class TensorMaps:
    """Tensor maps of views, kept by address: encoding one takes longer than a launch.

    Args:
        dtype: of the elements.
        device: the index.
        shape, strides: of the view, in elements.
        offset: of the view's first element from the tensor's.
        box: the tile.
        promote: whether reads should bring whole lines of L2.

    Attributes:
        known: gives the map of the tensor at an address; None where it is yet to be made.
    """

    _MOST = 64

    def __init__(
        self,
        dtype: DType,
        device: int,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        box: Sequence[int],
        *,
        promote: bool,
    ) -> None:
        self._offset = offset * dtype.itemsize
        self._encoded = partial(encoded, dtype, device, shape=tuple(shape), strides=tuple(strides), box=tuple(box), promote=promote)
        self._known: dict[int, bytes] = {}
        self.known = self._known.get

    def make(self, address: int) -> bytes:
        """The map of the view of the tensor at an address."""
        found = self._encoded(address + self._offset)
        if len(self._known) >= self._MOST:
            self._known.clear()
        self._known[address] = found
        return found
