"""A bound call as a list of instructions with constant sizes, run by the native module or by Python.

Instructions name tensors by registers: first the inputs of the call, in order, then initial values and results of instructions.

Large tensors are allocated right before the first instruction that needs them, and released after the last one. This includes
tensors that the caller donates: a backward pass frees saved tensors as it goes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack

from fusegen.errors import ArgumentError, IndexRangeError
from fusegen.lazy import dataclass
from fusegen.runtime import cuda
from fusegen.runtime.cuda import LaunchSite
from fusegen.runtime.library import FUNCTIONS, multiply, multiply_into
from fusegen.threads import cached_property


class Donated(list[Any]):
    """Values of a call that the callee may release after their last use; it empties the list."""


Scalars: TypeAlias = Mapping[str, float]
Registers: TypeAlias = list[Any]
RunCall: TypeAlias = Callable[[Sequence[Tensor], Scalars], Any]


class Runner(Protocol):
    """A bound call; ``call`` may be replaced when the native module is loaded."""

    @property
    def call(self) -> RunCall: ...

    def native_call(self, module: ModuleType) -> RunCall | None:
        """Returns the native function, which allocates its own memory; None if there is none."""


_NO_ADDRESS = "a kernel got a tensor without memory: a mode or transform around the call replaces allocated tensors"
_OUTSIDE = "call the kernel outside of torch.func's transforms and of modes that make tensors"
_INT64_LIMIT = 1 << 63

_ALLOCATORS: dict[str, Any] = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
"""Allocators of the current device that bypass the dispatcher, as in torch.compile: dispatch takes longer than allocation."""


@dataclass(frozen=True)
class Address:
    """The address of a tensor, plus an offset in bytes."""

    register: int
    offset: int = 0

    def value(self, registers: Registers, _: Scalars) -> int:
        tensor = registers[self.register]
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:  # tensors of torch.func have no address
            raise unreachable() from error
        if not address and tensor.numel():  # would crash the process
            raise unreachable()
        start: int = address + self.offset
        return start


@dataclass(frozen=True)
class ScalarValue:
    """A run-time scalar, as a float or a 64-bit integer."""

    name: str
    is_float: bool

    def value(self, _: Registers, scalars: Scalars) -> float:
        value = scalars[self.name]
        return float(value) if self.is_float else integer(value)


@dataclass(frozen=True)
class ConstantValue:
    number: int

    def value(self, _: Registers, __: Scalars) -> int:
        return self.number


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map of memory that begins at an address."""

    at: Address
    maps: cuda.TensorMaps

    def value(self, registers: Registers, scalars: Scalars) -> bytes:
        at = self.at.value(registers, scalars)
        return self.maps.known(at) or self.maps.make(at)


@dataclass(frozen=True)
class CounterValue:
    """The number of the current stream's counter."""

    device: int

    def value(self, _: object = None, __: object = None) -> int:
        return cuda.counter_of(self.device)


ArgumentValue: TypeAlias = Address | ScalarValue | ConstantValue | TensorMap | CounterValue


def values_of(arguments: Sequence[ArgumentValue], registers: Registers, scalars: Scalars) -> list[Any]:
    return [argument.value(registers, scalars) for argument in arguments]


@dataclass(frozen=True)
class Allocate:
    """Allocates a tensor on the current device of a kind.

    It bypasses torch's dispatcher, unless an active mode or transform may replace the tensor.

    Attributes:
        is_large: whether to request huge pages of the host.
    """

    register: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_large: bool

    @classmethod
    def row_major(cls, register: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
        is_large = device.type == "cpu" and math.prod(shape) * dtype.itemsize >= LARGE
        return cls(register, shape, contiguous(shape), dtype, device, is_large)

    def run(self, registers: Registers, _: Scalars) -> None:
        fresh = _ALLOCATORS.get(self.device.type)
        if fresh is None or dispatch_modes() or peek_interpreter_stack():
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        else:
            tensor = fresh(self.shape, self.strides, self.dtype)
        registers[self.register] = with_huge_pages(tensor) if self.is_large else tensor


@dataclass(frozen=True)
class View:
    """Views the memory of a tensor.

    Attributes:
        offset: elements of the view from the tensor's first element to its own.
    """

    register: int
    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def run(self, registers: Registers, _: Scalars) -> None:
        source = registers[self.source]
        if source.dtype is not self.dtype:
            source = source.view(self.dtype)
        registers[self.register] = source.as_strided(self.shape, self.strides, source.storage_offset() + self.offset)


@dataclass(frozen=True)
class Release:
    """Drops tensors that no later instruction uses."""

    registers: tuple[int, ...]

    def run(self, registers: Registers, _: Scalars) -> None:
        for register in self.registers:
            registers[register] = None


@dataclass(frozen=True)
class MakeKey:
    """Creates the key of random bits, one int64: a number, or a draw from the device's generator if ``number`` is None."""

    register: int
    device: torch.device
    number: ScalarValue | ConstantValue | None

    def run(self, registers: Registers, scalars: Scalars) -> None:
        registers[self.register] = self.key(scalars)

    def key(self, scalars: Scalars) -> Tensor:
        if self.number is None:
            return drawn_key(self.device)
        return torch.full((1,), int(self.number.value([], scalars)), dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class LaunchKernel:
    """Launches a kernel on the current stream of torch, with one argument per parameter."""

    site: LaunchSite
    arguments: tuple[ArgumentValue, ...]

    @cached_property
    def _variable_arguments(self) -> list[ArgumentValue]:
        return [argument for argument in self.arguments if not isinstance(argument, ConstantValue)]

    def run(self, registers: Registers, scalars: Scalars) -> None:
        self.site(cuda.queries()[0](self.site.device), values_of(self._variable_arguments, registers, scalars))


@dataclass(frozen=True)
class HostLaunch:
    """Runs a kernel of the CPU target.

    Attributes:
        kernel: takes the address of the arguments, eight bytes each.
        refusal: creates the error for an index out of range; None for a kernel without gathers.
    """

    kernel: Callable[[bytes], None]
    arguments: tuple[ArgumentValue, ...]
    pack: Callable[..., bytes]
    refusal: Callable[[str], IndexRangeError] | None

    @property
    def address(self) -> int:
        return ctypes.cast(cast(Any, self.kernel), ctypes.c_void_p).value or 0

    def run(self, registers: Registers, scalars: Scalars) -> None:
        values = values_of(self.arguments, registers, scalars)
        if self.refusal is None:
            self.kernel(self.pack(*values))
            return
        message = ctypes.c_char_p()
        self.kernel(self.pack(*values, ctypes.addressof(message)))
        if message.value is not None:
            raise self.refusal(message.value.decode())


@dataclass(frozen=True)
class Matmul:
    """Computes a matmul by torch.mm or torch.bmm; ``wider`` is the dtype of the result, if it differs from the operands'."""

    a: int
    b: int
    out: int
    is_batched: bool
    wider: torch.dtype | None

    def run(self, registers: Registers, _: Scalars) -> None:
        function: Any = torch.bmm if self.is_batched else torch.mm
        wider = {} if self.wider is None else {"out_dtype": self.wider}
        function(registers[self.a], registers[self.b], out=registers[self.out], **wider)


@dataclass(frozen=True)
class MultiStepMatmul:
    """Computes a matmul that needs several torch functions; ``adds`` accumulates into the result."""

    a: int
    b: int
    out: int
    adds: bool

    def run(self, registers: Registers, _: Scalars) -> None:
        function = multiply_into if self.adds else multiply
        function(registers[self.a], registers[self.b], registers[self.out])


@dataclass(frozen=True)
class CallLibrary:
    """Calls a function that allocates its results.

    Attributes:
        name: a key of `FUNCTIONS`.
        leading_arguments: the arguments before the operands.
        results: for each result its register, the permutation of its dims, and its final shape.
    """

    name: str
    leading_arguments: tuple[Any, ...]
    operands: tuple[int, ...]
    results: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def function(self) -> Callable[..., Sequence[Tensor]]:
        return partial(FUNCTIONS[self.name].run, *self.leading_arguments)

    def run(self, registers: Registers, _: Scalars) -> None:
        tensors = self.function(*[registers[operand] for operand in self.operands])
        for tensor, (register, order, shape) in zip(tensors, self.results, strict=True):
            in_order = tensor if order == tuple(range(len(order))) else tensor.permute(order)
            registers[register] = in_order.contiguous().view(shape)


@dataclass(frozen=True)
class CallFunction:
    """Calls a function on tensors that it may write to."""

    function: RunCall
    tensors: tuple[int, ...]

    def run(self, registers: Registers, scalars: Scalars) -> None:
        self.function([registers[register] for register in self.tensors], scalars)


Instruction: TypeAlias = (
    Allocate | View | Release | MakeKey | LaunchKernel | HostLaunch | Matmul | MultiStepMatmul | CallLibrary | CallFunction
)


@dataclass(frozen=True)
class Instructions:
    """A call as a function of its tensors and of its scalars by name.

    Attributes:
        inputs: the number of tensors.
        initial: the initial values of the registers after the inputs; some are constant tensors.
        results: registers.
        pack_results: builds the result from its tensors; None if the only tensor, or None, is the result.
        gpu: the GPU that must be current; None for none.
    """

    inputs: int
    initial: tuple[Any, ...]
    body: tuple[Instruction, ...]
    results: tuple[int, ...]
    pack_results: Callable[[list[Tensor]], Any] | None
    gpu: int | None

    def __call__(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        if self.gpu is not None and cuda.queries()[1]() != self.gpu:
            with torch.cuda.device(self.gpu):
                return self(tensors, scalars)
        registers = [*tensors, *self.initial]
        if type(tensors) is Donated:
            tensors.clear()
        for instruction in self.body:
            instruction.run(registers, scalars)
        outputs = [registers[register] for register in self.results]
        if self.pack_results is not None:
            return self.pack_results(outputs)
        return outputs[0] if outputs else None


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns row-major strides, like torch."""
    return tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def drawn_key(device: torch.device) -> Tensor:
    """Draws a key from the generator of a device, as a torch operation: a CUDA graph draws at each replay."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def unreachable() -> ArgumentError:
    return ArgumentError(_NO_ADDRESS, hint=_OUTSIDE)


def integer(value: float) -> int:
    """Truncates a number to 64 bits; out of range it gives −2⁶³, like x86 conversions."""
    return int(value) if isinstance(value, int) or -_INT64_LIMIT <= value < _INT64_LIMIT else -_INT64_LIMIT


# Huge pages of 2 MiB for large host tensors: the first write to a page faults, and with 4 KiB pages the faults take longer than
# most kernels. The cleared page is in the cache then; streaming stores, which bypass it, would take a third longer. torch does the
# same for all tensors if THP_MEM_ALLOC_ENABLE is set.


LARGE = 4 << 20
"""Bytes from which a tensor always contains a full huge page."""

_PAGE = 2 << 20
_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h


def with_huge_pages(tensor: Tensor) -> Tensor:
    """Requests huge pages for a new `LARGE` host tensor, and returns it."""
    address = _address(tensor) if _ADVISE is not None else 0
    if address:
        size = tensor.nbytes
        first = -(-address // _PAGE) * _PAGE
        _ADVISE(first, (address + size - first) // _PAGE * _PAGE, _HUGE_PAGES)  # an error is harmless
    return tensor


def _address(tensor: Tensor) -> int:
    """Returns the address; 0 for a tensor without memory, which the call itself rejects later."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


_ADVISE = _madvise()
