"""For which calls a program is good, how its results are put together, and how its passes are connected, as data."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from fusegen.dtypes import DType
from fusegen.program.formula import Formula, FormulaKind, Relation
from fusegen.program.numbers import Numbers


@dataclass(frozen=True)
class TensorArgument:
    """A tensor.

    Attributes:
        dtype: its element type.
        shape: literal sizes, or names of sizes.
        strides: elements from one index to the next, a dim each; what is a name of its own may be any.
        alignment: bytes, up to 16, that divide the address and every stride that has a name of its own.
    """

    dtype: DType
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    alignment: int

    @property
    def own_strides(self) -> tuple[bool, ...]:
        """For each dim, whether its stride has a name of its own: the sizes do not imply it."""
        sizes = frozenset[str]().union(*(extent.sizes for extent in self.shape))
        return tuple(not stride.sizes <= sizes for stride in self.strides)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"{text} of strides [{', '.join(map(str, self.strides))}]" if any(self.own_strides) else text


@dataclass(frozen=True)
class NumberArgument:
    """A run-time number: a float, or an int of 64 bits.

    Attributes:
        is_float: True of a float.
        takes_ints: True of a float for which an int gives the same, as it does where it meets floats alone.
    """

    is_float: bool
    takes_ints: bool = False

    def __str__(self) -> str:
        return "float" if self.is_float else "int"


@dataclass(frozen=True)
class ExtentArgument:
    """An int that is used as a size, by the size's name."""

    size: str

    def __str__(self) -> str:
        return f"int {self.size}"


@dataclass(frozen=True)
class Constant:
    """A value that selected code: None, a truth, a number, a text, a dtype of torch, or a tuple of such."""

    value: object

    def __str__(self) -> str:
        return repr(self.value)


ArgumentSpec: TypeAlias = TensorArgument | NumberArgument | ExtentArgument | Constant


@dataclass(frozen=True)
class Signature:
    """The assumptions of a program about a call.

    Attributes:
        arguments: one a parameter.
        default_dtype: torch's, on which depends what some functions give.
        autocast: the dtype of torch.autocast, which converts operands; None where it is off.
        multiples: what divides a size, by its name.
        bounds: what a size does not pass, likewise.
        relations: of sizes.
        rows: likewise, by which one of several programs is taken that are all good for the call.
        conditions: of numbers.
        wide: whether indices have 64 bits.
        distinct: whether no tensor may be given twice, since the function asks whether two things are one.
    """

    arguments: tuple[ArgumentSpec, ...]
    default_dtype: DType
    autocast: DType | None
    multiples: tuple[tuple[str, int], ...]
    bounds: tuple[tuple[str, int], ...]
    relations: tuple[Relation, ...]
    rows: tuple[Relation, ...]
    conditions: Numbers
    wide: bool
    distinct: bool

    @property
    def sizes(self) -> frozenset[str]:
        """Names of the sizes that dims and ints give."""
        tensors = [a for a in self.arguments if isinstance(a, TensorArgument)]
        dims = {str(dim.value) for tensor in tensors for dim in tensor.shape if dim.operator is FormulaKind.SIZE}
        return frozenset(dims | {a.size for a in self.arguments if isinstance(a, ExtentArgument)})


# How the results of a function are put together of tensors, as data.


class ContainerKind(Enum):
    """The kind of container that holds the parts."""

    TENSOR = "tensor"
    COMPLEX = "complex"
    NONE = "none"
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    NAMED_TUPLE = "named tuple"


@dataclass(frozen=True)
class ResultStructure:
    """A tensor, None, or something that holds structures.

    Attributes:
        kind: what holds them; a complex tensor is one of pairs, its part.
        parts: in order.
        keys: of a dict's values, or names of a named tuple's fields.
        name: of a named tuple's class.
    """

    kind: ContainerKind
    parts: tuple[ResultStructure, ...] = ()
    keys: tuple[str | int, ...] = ()
    name: str = ""

    @property
    def tensors(self) -> int:
        """The number of tensors that it holds."""
        return 1 if self.kind is ContainerKind.TENSOR else sum(part.tensors for part in self.parts)


def builder(structure: ResultStructure) -> Callable[[list[Any]], Any] | None:
    """The constructor of results of their tensors; None where the tensor is the result.

    A named tuple is of a class of its own, with the name and the fields of the function's.

    Raises:
        ValueError: a named tuple's class or fields cannot have their names, or there are more keys than parts.
    """
    if structure.kind is ContainerKind.TENSOR:
        return None
    make = _maker(structure)
    return lambda tensors: make(iter(tensors))


def _maker(structure: ResultStructure) -> Callable[[Iterator[Any]], Any]:
    if structure.kind is ContainerKind.TENSOR:
        return next
    parts = [_maker(part) for part in structure.parts]
    if len(structure.keys) != (len(parts) if structure.kind in (ContainerKind.DICT, ContainerKind.NAMED_TUPLE) else 0):
        raise ValueError(f"{len(structure.keys)} keys for {len(parts)} parts of a {structure.kind.value}")
    if structure.kind is ContainerKind.NONE:
        return lambda tensors: None
    if structure.kind is ContainerKind.COMPLEX:
        if len(parts) != 1:
            raise ValueError(f"{len(parts)} parts of a complex tensor")
        return lambda tensors: torch.view_as_complex(parts[0](tensors))
    if structure.kind is ContainerKind.DICT:
        keys = structure.keys
        return lambda tensors: {key: part(tensors) for key, part in zip(keys, parts, strict=True)}
    if structure.kind is ContainerKind.NAMED_TUPLE:
        named: Any = namedtuple(structure.name, [str(key) for key in structure.keys])  # type: ignore[misc]
        return lambda tensors: named(*(part(tensors) for part in parts))
    holder = tuple if structure.kind is ContainerKind.TUPLE else list
    return lambda tensors: holder(part(tensors) for part in parts)


# The connection of a kernel's two passes, as data: where the values of each come from, and where its results go.


@dataclass(frozen=True)
class Wiring:
    """Connects a forward pass, a backward pass and autograd.

    Attributes:
        name: of the backward pass, for messages.
        inputs: names of the values that the forward pass takes.
        results: the number of the kernel's own results, which are the first of the forward pass.
        floats: those of them by which the backward pass takes a gradient.
        tensors: names of the tensors that the backward pass takes: the saved ones, then a gradient for each of ``floats``.
        saved: the source of each saved tensor: an input of the forward pass by name, or a result of it by number.
        sizes: names of the sizes that the backward pass takes behind its tensors.
        numbers: names of the run-time numbers that it takes last, which are inputs of the forward pass.
        gradients: inputs of the forward pass that have gradients, each with the source: a result of the backward pass by number,
            or the name of one of its tensors, where a gradient passes through unchanged.
        key: the input of the forward pass that is the key of its random bits; None where none is drawn.
    """

    name: str
    inputs: tuple[str, ...]
    results: int
    floats: tuple[int, ...]
    tensors: tuple[str, ...]
    saved: tuple[str | int, ...]
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    gradients: tuple[tuple[str, str | int], ...]
    key: str | None

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of all values that the backward pass takes."""
        return (*self.tensors, *self.sizes, *self.numbers)
