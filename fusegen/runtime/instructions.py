"""A bound call as a list of instructions, in which all sizes are numbers: data that the native module reads once and runs, and that
Python runs where there is no such module.

Instructions name tensors by registers: the call's inputs first, in order, then what is held and what instructions make.

Large values are allocated right before the first instruction that needs them, and released behind the last: values of the call's
own, results of torch's functions, and the caller's tensors where these are given away. So a backward pass keeps no more of what
the forward pass saved than it still needs.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack

from fusegen.errors import ArgumentError, IndexRangeError
from fusegen.runtime import cuda
from fusegen.runtime.cuda import LaunchSite
from fusegen.runtime.library import FUNCTIONS, multiply, multiply_into
from fusegen.threads import cached_property

# Values of a call that nobody else needs: each may be let go as soon as the call has read it.


class GivenAway(list[Any]):
    """Values that the callee empties."""


# Bound calls.


Scalars: TypeAlias = Mapping[str, float]
Registers: TypeAlias = list[Any]
RunCall: TypeAlias = Callable[[Sequence[Tensor], Scalars], Any]


class Runner(Protocol):
    """A bound call, whose ``call`` runs it; it may be another function after the native module is loaded."""

    @property
    def call(self) -> RunCall: ...

    def made(self, module: ModuleType) -> RunCall | None:
        """The same on memory of its own, by the native module alone; None where there is no such thing."""


_STOOD_IN = "a kernel was given a tensor without memory: something around the call stands in for what torch allocates"
_OUTSIDE = "call the kernel outside of torch.func's transforms and of modes that make tensors"
_BEYOND = 1 << 63

_FRESH: dict[str, Any] = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}
"""Fresh tensors on the current device of a kind, past the dispatcher, as code that torch compiles has them: the dispatcher takes
longer than the allocation."""


# Arguments of launches.


@dataclass(frozen=True)
class Address:
    """The address of a tensor.

    Attributes:
        offset: from it, in bytes.
    """

    register: int
    offset: int = 0

    def value(self, registers: Registers, _: Scalars) -> int:
        tensor = registers[self.register]
        try:
            address = tensor.data_ptr()
        except RuntimeError as error:  # torch.func hands out tensors of which torch tells no address
            raise unreachable() from error
        if not address and tensor.numel():  # else the process would end
            raise unreachable()
        found: int = address + self.offset
        return found


@dataclass(frozen=True)
class ScalarValue:
    """A run-time scalar, as a float or an integer of 64 bits."""

    name: str
    is_float: bool

    def value(self, _: Registers, scalars: Scalars) -> float:
        value = scalars[self.name]
        return float(value) if self.is_float else integer(value)


@dataclass(frozen=True)
class ConstantValue:
    """An integer."""

    number: int

    def value(self, _: Registers, __: Scalars) -> int:
        return self.number


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of memory that begins at an address."""

    at: Address
    maps: cuda.TensorMaps

    def value(self, registers: Registers, scalars: Scalars) -> bytes:
        at = self.at.value(registers, scalars)
        return self.maps.known(at) or self.maps.make(at)


ArgumentValue: TypeAlias = Address | ScalarValue | ConstantValue | TensorMap


def values_of(arguments: Sequence[ArgumentValue], registers: Registers, scalars: Scalars) -> list[Any]:
    """Evaluates arguments."""
    return [argument.value(registers, scalars) for argument in arguments]


# Instructions.


@dataclass(frozen=True)
class Allocate:
    """Makes a fresh tensor on the current device of a kind: past torch's dispatcher, unless a mode or a transform is on that may
    want to see it, and replace it.

    Attributes:
        is_large: asks the host's system for large pages.
    """

    register: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_large: bool

    @classmethod
    def row_major(cls, register: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
        """The allocation of a row-major tensor."""
        is_large = device.type == "cpu" and math.prod(shape) * dtype.itemsize >= LARGE
        return cls(register, shape, contiguous(shape), dtype, device, is_large)

    def run(self, registers: Registers, _: Scalars) -> None:
        fresh = _FRESH.get(self.device.type)
        if fresh is None or dispatch_modes() or peek_interpreter_stack():
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        else:
            made = fresh(self.shape, self.strides, self.dtype)
        registers[self.register] = in_large_pages(made) if self.is_large else made


@dataclass(frozen=True)
class View:
    """Views the memory of a tensor.

    Attributes:
        dtype: of the view, whose elements divide those bytes.
        offset: from the tensor's first element, in elements of the view.
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
    """Lets go of tensors that no later instruction names."""

    registers: tuple[int, ...]

    def run(self, registers: Registers, _: Scalars) -> None:
        for register in self.registers:
            registers[register] = None


@dataclass(frozen=True)
class MakeKey:
    """Makes the key of random bits, one int64: a number, or what torch's generator of the device gives.

    Attributes:
        number: None to draw it.
    """

    register: int
    device: torch.device
    number: ScalarValue | ConstantValue | None

    def run(self, registers: Registers, scalars: Scalars) -> None:
        registers[self.register] = self.made(scalars)

    def made(self, scalars: Scalars) -> Tensor:
        """The key of a call."""
        if self.number is None:
            return drawn_key(self.device)
        return torch.full((1,), int(self.number.value([], scalars)), dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class LaunchKernel:
    """Launches a kernel on the stream that torch uses now.

    Attributes:
        arguments: one a parameter.
    """

    site: LaunchSite
    arguments: tuple[ArgumentValue, ...]

    @cached_property
    def _differing(self) -> list[ArgumentValue]:
        return [argument for argument in self.arguments if not isinstance(argument, ConstantValue)]

    def run(self, registers: Registers, scalars: Scalars) -> None:
        self.site(cuda.queries()[0](self.site.device), values_of(self._differing, registers, scalars))


@dataclass(frozen=True)
class HostLaunch:
    """Runs a kernel of the CPU target.

    Attributes:
        kernel: takes the address of the arguments, eight bytes each.
        pack: packs them.
        refusal: makes the error of what the kernel says of an index; None of one that reads none.
    """

    kernel: Callable[[bytes], None]
    arguments: tuple[ArgumentValue, ...]
    pack: Callable[..., bytes]
    refusal: Callable[[str], IndexRangeError] | None

    @property
    def address(self) -> int:
        """The kernel's address."""
        return ctypes.cast(cast(Any, self.kernel), ctypes.c_void_p).value or 0

    def run(self, registers: Registers, scalars: Scalars) -> None:
        given = values_of(self.arguments, registers, scalars)
        if self.refusal is None:
            self.kernel(self.pack(*given))
            return
        failed = ctypes.c_char_p()
        self.kernel(self.pack(*given, ctypes.addressof(failed)))
        if failed.value is not None:
            raise self.refusal(failed.value.decode())


@dataclass(frozen=True)
class Product:
    """Multiplies matrices, or as many planes of them, by torch.

    Attributes:
        is_batched: tells of planes.
        wider: the dtype of the result, where it is not that of the operands.
    """

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
class Multiply:
    """Multiplies matrices that no single function of torch takes as they lie.

    Attributes:
        adds: tells if the product is added to the result.
    """

    a: int
    b: int
    out: int
    adds: bool

    def run(self, registers: Registers, _: Scalars) -> None:
        function = multiply_into if self.adds else multiply
        function(registers[self.a], registers[self.b], registers[self.out])


@dataclass(frozen=True)
class Library:
    """Calls a function that makes its results.

    Attributes:
        name: of one of `FUNCTIONS`.
        given: what it takes before the operands.
        results: for each result its register, the order in which its dims lie in memory, and its shape there.
    """

    name: str
    given: tuple[Any, ...]
    operands: tuple[int, ...]
    results: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def function(self) -> Callable[..., Sequence[Tensor]]:
        """A function of the operands."""
        return partial(FUNCTIONS[self.name].run, *self.given)

    def run(self, registers: Registers, _: Scalars) -> None:
        made = self.function(*[registers[operand] for operand in self.operands])
        for tensor, (register, order, shape) in zip(made, self.results, strict=True):
            in_order = tensor if order == tuple(range(len(order))) else tensor.permute(order)
            registers[register] = in_order.contiguous().view(shape)


@dataclass(frozen=True)
class Do:
    """Calls a function on tensors that it may write to."""

    function: RunCall
    tensors: tuple[int, ...]

    def run(self, registers: Registers, scalars: Scalars) -> None:
        self.function([registers[register] for register in self.tensors], scalars)


Instruction: TypeAlias = Allocate | View | Release | MakeKey | LaunchKernel | HostLaunch | Product | Multiply | Library | Do


@dataclass(frozen=True)
class Instructions:
    """All of a call: a function of its tensors and of its scalars by name.

    Attributes:
        inputs: the number of its tensors.
        held: what the registers behind the inputs hold at first, among them tensors that are the same in all calls.
        body: in order.
        results: the registers of the results.
        put_together: makes the results of their tensors; None where the only tensor, or none, is the result.
        gpu: the index of the GPU that must be current; None for none.
    """

    inputs: int
    held: tuple[Any, ...]
    body: tuple[Instruction, ...]
    results: tuple[int, ...]
    put_together: Callable[[list[Tensor]], Any] | None
    gpu: int | None

    def __call__(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        if self.gpu is not None and cuda.queries()[1]() != self.gpu:
            with torch.cuda.device(self.gpu):
                return self(tensors, scalars)
        registers = [*tensors, *self.held]
        if type(tensors) is GivenAway:
            tensors.clear()
        for instruction in self.body:
            instruction.run(registers, scalars)
        found = [registers[register] for register in self.results]
        if self.put_together is not None:
            return self.put_together(found)
        return found[0] if found else None


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch has them."""
    return tuple(math.prod(max(extent, 1) for extent in shape[dim + 1 :]) for dim in range(len(shape)))


def drawn_key(device: torch.device) -> Tensor:
    """A key from torch's generator of a device, one int64. An operation of torch's draws it: in a CUDA graph, at each replay."""
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def unreachable() -> ArgumentError:
    """The error of a call on a tensor that has no address."""
    return ArgumentError(_STOOD_IN, hint=_OUTSIDE)


def integer(value: float) -> int:
    """A number without its fraction; what 64 bits cannot hold as a processor's conversion gives it."""
    return int(value) if isinstance(value, int) or -_BEYOND <= value < _BEYOND else -_BEYOND


# Pages of 2 MiB for large tensors on the host: a kernel that writes fresh memory is stopped once a page by the system, which
# clears it then, and with the usual 4 KiB that takes longer than most kernels. What has just been cleared lies in the cache:
# streaming stores past it would take a third longer. torch does the same for all of its tensors where THP_MEM_ALLOC_ENABLE is
# set.


LARGE = 4 << 20
"""Bytes from which on a tensor holds whole pages wherever it lies."""

_PAGE = 2 << 20
_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h


def in_large_pages(tensor: Tensor) -> Tensor:
    """A fresh tensor of the host that is `LARGE`, after the system was asked for large pages."""
    address = _address(tensor) if _ADVISE is not None else 0
    if address:
        size = tensor.nbytes
        first = -(-address // _PAGE) * _PAGE
        _ADVISE(first, (address + size - first) // _PAGE * _PAGE, _HUGE_PAGES)  # a system without such pages refuses: no harm
    return tensor


def _address(tensor: Tensor) -> int:
    """0 of a tensor that something around the call hands out in place of one with memory: the call itself refuses it."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _madvise() -> Any:
    """The system's function, where there is one."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


_ADVISE = _madvise()
