"""Plain data: assumptions of a program about its calls, structure of its results, wiring of its forward and backward pass."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeAlias

import torch

from fusegen.dtypes import DType
from fusegen.lazy import dataclass
from fusegen.program.formula import Formula, FormulaKind, Relation
from fusegen.program.numbers import Numbers


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument.

    Attributes:
        shape: literal sizes, or names of sizes.
        strides: in elements. A stride with a name of its own may have any value.
        alignment: bytes, up to 16, that divide the address and every stride with a name of its own.
    """

    dtype: DType
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    alignment: int

    @property
    def own_strides(self) -> tuple[bool, ...]:
        """For each dim, whether its stride has a name of its own, i.e. is not implied by the sizes."""
        sizes = frozenset[str]().union(*(extent.sizes for extent in self.shape))
        return tuple(not stride.sizes <= sizes for stride in self.strides)

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"{text} with strides [{', '.join(map(str, self.strides))}]" if any(self.own_strides) else text


@dataclass(frozen=True)
class NumberArgument:
    """A run-time number: a float, or a 64-bit int. `takes_ints` tells whether an int yields the same as an equal float."""

    is_float: bool
    takes_ints: bool = False

    def __str__(self) -> str:
        return "float" if self.is_float else "int"


@dataclass(frozen=True)
class ExtentArgument:
    """An int that is used as a size."""

    size: str

    def __str__(self) -> str:
        return f"int {self.size}"


@dataclass(frozen=True)
class Constant:
    """An argument that selected code: None, a bool, number, string, dtype of torch, or a tuple of these."""

    value: object

    def __str__(self) -> str:
        return repr(self.value)


ArgumentSpec: TypeAlias = TensorArgument | NumberArgument | ExtentArgument | Constant


@dataclass(frozen=True)
class Signature:
    """The assumptions of a program about a call.

    Attributes:
        arguments: one per parameter.
        default_dtype: torch's default dtype.
        autocast: the dtype of torch.autocast, or None if it is off.
        multiples: known divisors of sizes, by name.
        bounds: known upper bounds of sizes, by name.
        relations: relations of sizes that must hold.
        conditions: conditions on numbers.
        index64: whether it uses 64-bit indexing.
        distinct: whether all tensors must be distinct, since the function compares identities.
    """

    arguments: tuple[ArgumentSpec, ...]
    default_dtype: DType
    autocast: DType | None
    multiples: tuple[tuple[str, int], ...]
    bounds: tuple[tuple[str, int], ...]
    relations: tuple[Relation, ...]
    conditions: Numbers
    index64: bool
    distinct: bool

    @property
    def sizes(self) -> frozenset[str]:
        """Names of the sizes that tensors and ints define."""
        tensors = [a for a in self.arguments if isinstance(a, TensorArgument)]
        dims = {str(dim.value) for tensor in tensors for dim in tensor.shape if dim.operator is FormulaKind.SIZE}
        return frozenset(dims | {a.size for a in self.arguments if isinstance(a, ExtentArgument)})


# Structure of results.


class ContainerKind(Enum):
    TENSOR = "tensor"
    COMPLEX = "complex"
    NONE = "none"
    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    NAMED_TUPLE = "named tuple"


@dataclass(frozen=True)
class ResultStructure:
    """A tensor, None, or a container of structures.

    Attributes:
        kind: a complex tensor has one part, its real view.
        keys: keys of a dict, or field names of a named tuple.
        name: class name of a named tuple.
    """

    kind: ContainerKind
    parts: tuple[ResultStructure, ...] = ()
    keys: tuple[str | int, ...] = ()
    name: str = ""

    @property
    def tensors(self) -> int:
        """Number of tensors in the structure."""
        return 1 if self.kind is ContainerKind.TENSOR else sum(part.tensors for part in self.parts)


def builder(structure: ResultStructure) -> Callable[[list[Any]], Any] | None:
    """Returns a function that builds results from their tensors, or None if the result is a tensor.

    Named tuples get a new class with the original's name and fields.

    Raises:
        ValueError: invalid names of a named tuple, or a wrong number of keys.
    """
    if structure.kind is ContainerKind.TENSOR:
        return None
    make = _maker(structure)
    return lambda tensors: make(iter(tensors))


def _maker(structure: ResultStructure) -> Callable[[Iterator[Any]], Any]:
    if structure.kind is ContainerKind.TENSOR:
        return next
    makers = [_maker(make_part) for make_part in structure.parts]
    if len(structure.keys) != (len(makers) if structure.kind in (ContainerKind.DICT, ContainerKind.NAMED_TUPLE) else 0):
        raise ValueError(f"{len(structure.keys)} keys for {len(makers)} parts of a {structure.kind.value}")
    if structure.kind is ContainerKind.NONE:
        return lambda tensors: None
    if structure.kind is ContainerKind.COMPLEX:
        if len(makers) != 1:
            raise ValueError(f"{len(makers)} parts of a complex tensor")
        return lambda tensors: torch.view_as_complex(makers[0](tensors))
    if structure.kind is ContainerKind.DICT:
        keys = structure.keys
        return lambda tensors: {key: make_part(tensors) for key, make_part in zip(keys, makers, strict=True)}
    if structure.kind is ContainerKind.NAMED_TUPLE:
        named: Any = namedtuple(structure.name, [str(key) for key in structure.keys])  # type: ignore[misc]
        return lambda tensors: named(*(make_part(tensors) for make_part in makers))
    holder = tuple if structure.kind is ContainerKind.TUPLE else list
    return lambda tensors: holder(make_part(tensors) for make_part in makers)


# Wiring of a kernel's two passes.


@dataclass(frozen=True)
class Wiring:
    """Connects a forward pass, a backward pass and autograd.

    Attributes:
        name: the backward pass, for messages.
        inputs: names of the forward pass's inputs.
        results: number of the kernel's own results, which come first in the forward pass's.
        floats: positions of the results whose gradients the backward pass takes.
        tensors: names of the backward pass's tensors: the saved ones, then a gradient for each of ``floats``.
        saved: source of each saved tensor: a forward input by name, or a forward result by position.
        sizes: names of the sizes that the backward pass takes after its tensors.
        numbers: names of the run-time numbers that it takes last; they are forward inputs.
        gradients: differentiable forward inputs, each with its source: a backward result by position, or the name of a backward
            tensor that passes through.
        key: the forward input with the random key, or None.
        saves_dependent: True if saved tensors besides inputs and results are functions of differentiable inputs.
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
    saves_dependent: bool

    @property
    def backward_inputs(self) -> tuple[str, ...]:
        """Names of all inputs of the backward pass."""
        return (*self.tensors, *self.sizes, *self.numbers)
