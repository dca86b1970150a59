"""For which calls a program is good: all that it assumes of its arguments, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.program.formula import Formula, Operator, Relation
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


Argument: TypeAlias = TensorArgument | NumberArgument | ExtentArgument | Constant


@dataclass(frozen=True)
class Signature:
    """What a program assumes of a call.

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

    arguments: tuple[Argument, ...]
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
        dims = {str(dim.value) for tensor in tensors for dim in tensor.shape if dim.operator is Operator.SIZE}
        return frozenset(dims | {a.size for a in self.arguments if isinstance(a, ExtentArgument)})
