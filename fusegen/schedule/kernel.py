"""Kernels: their buffers, sizes, scalars and math functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import sympy

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Dim
from fusegen.schedule.math import Approximations, MathFunction, MathParameter, MathResult
from fusegen.schedule.terms import Leaf, Term, Terms

SCRATCH_BYTES = 8
"""Bytes of the widest element in exchanged states."""
_ALIGNMENT = 16  # bytes of the widest access
_LINE = 128  # bytes that the banks of shared memory deliver at once
BARRIER_BYTES = 8
BANKS = 32  # of 4 bytes
_MULTIPLE = 8  # elements; arrays are padded to multiples, so that the next one is aligned


@dataclass(frozen=True)
class SharedArrays:
    """Byte offsets of the arrays in shared memory, and the bytes of all arrays.

    Attributes:
        scratch: components of states that threads exchange.
        ordered: rows that threads sort.
        sums: components of column sums that the row groups of a block add to.
        staged: fragments of rows.
        barriers: each counts the bytes that other blocks send for one reduction.
    """

    bytes: int
    scratch: tuple[int, ...]
    ordered: tuple[int, ...]
    sums: tuple[int, ...]
    staged: tuple[int, ...]
    barriers: tuple[int, ...]


def padded(elements: int) -> int:
    """Returns a size with one gap per 32 elements, so that threads that store consecutive elements have no bank conflicts."""
    size = elements + elements // BANKS
    return -(-size // _MULTIPLE) * _MULTIPLE


def arrange_shared_arrays(
    scratch: Sequence[int] = (),
    sums: Sequence[int] = (),
    staged: Sequence[int] = (),
    barriers: Sequence[int] = (),
    ordered: Sequence[int] = (),
) -> SharedArrays:
    """Arranges arrays of the given bytes one behind the other; each besides barriers is aligned for the widest access. Staged rows
    begin a line of 128 bytes, which a warp then fills: half a line off, a layer_norm_backward took 4 % longer on an H200."""
    end, arranged = 0, []
    for sizes, start, multiple in (
        (scratch, _ALIGNMENT, _ALIGNMENT),
        (ordered, _ALIGNMENT, _ALIGNMENT),
        (sums, _ALIGNMENT, _ALIGNMENT),
        (staged, _LINE, _ALIGNMENT),
        (barriers, 1, 1),
    ):
        begin = -(-end // start) * start if sizes else end
        *offsets, end = accumulate((begin, *(-(-size // multiple) * multiple for size in sizes)))
        arranged.append(tuple(offsets))
    return SharedArrays(end, *arranged)


@dataclass(frozen=True)
class Plan:
    """The layout of a kernel: a frozen dataclass per pipeline. Unless it `fixes_threads`, horizontal fusion may change the number
    of threads per block."""

    fixes_threads: ClassVar[bool] = True

    @property
    def description(self) -> str:
        """A description that distinguishes it from the other candidates."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class Implementation(Plan):
    """A candidate that is a program of its own: generated kernels, or functions of the library."""

    name: str

    @property
    def description(self) -> str:
        return self.name


GENERATED, LIBRARY = Implementation("generated kernel"), Implementation("library")


class Body:
    """The content of a kernel: a frozen dataclass per pipeline. Horizontal fusion requires `can_be_part`."""

    plan: Plan
    can_be_part: ClassVar[bool] = False

    @property
    def chosen_plan(self) -> Plan | None:
        """The plan, if it was chosen from several candidates."""
        return None

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return 1

    @property
    def blocks_per_sm(self) -> int:
        """Blocks per SM that the register limit must allow."""
        return 1

    @property
    def counts(self) -> tuple[Dim, ...]:
        """The numbers of rows and columns that it reduces or scans."""
        return ()

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        """The element types of tiles, which may be loaded and stored without a pointer parameter."""
        return frozenset()

    @property
    def reason(self) -> str:
        """The reason for its layout on a GPU; empty if the plan is self-explanatory."""
        return ""

    def describe(self, kind: str) -> str:
        """Describes the kernel and its layout, given the description of the group's kind."""
        return kind


@dataclass(frozen=True)
class Pointer:
    """A pointer parameter. For random bits it points to their key, and `stream` is their number within the key; None for buffers in
    memory.

    Attributes:
        shape: the buffer's shape, in words for a comment.
        layout: its strides and alignment, in words.
        readers: the kinds of the other launches that read a temporary which this kernel writes.
    """

    buffer: int
    name: str
    dtype: DType
    writable: bool
    stream: int | None = None
    shape: str = field(default="", compare=False)
    layout: str = field(default="", compare=False)
    readers: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, repr=False)
class LoweredKernel:
    """A kernel before emission. Its symbol is ``fg_`` and the name; `checks` is True if it checks indices that it reads."""

    name: str
    pointers: tuple[Pointer, ...]
    sizes: tuple[str, ...]
    scalars: tuple[tuple[str, DType], ...]
    body: Body
    index64: bool = False
    checks: bool = False

    def __repr__(self) -> str:
        return f"<kernel {self.name}: {type(self.body).__name__}>"


# Extraction of math functions from the terms of a kernel.


def extract_function(
    terms: Terms,
    name: str,
    roots: Sequence[tuple[str, int]],
    leaves: Mapping[int, MathParameter],
    *,
    fast: Approximations,
    doc: str = "",
) -> tuple[MathFunction, tuple[int, ...]]:
    """Extracts the function that computes named roots, with leaves as its parameters.

    Leaves may share a parameter (lanes), whose name is then a complete expression. Also returns the leaves that the function uses,
    in the order of its parameters.
    """
    stop = frozenset(leaves)
    body = terms.producers(tuple(t for _, t in roots), stop)
    local = {position: k for k, position in enumerate(body)}
    used = tuple(p for p in leaves if p in local)
    renumbered = tuple(_localized(terms.items[p], local, p in stop) for p in body)
    parameters = dict.fromkeys(leaves[p] for p in used)
    function = MathFunction(
        name=name,
        parameters=tuple(parameters),
        terms=renumbered,
        leaves=tuple((local[p], leaves[p].name) for p in used),
        results=tuple(MathResult(n, local[t], terms.items[t].dtype) for n, t in roots),
        locations=tuple(terms.locations[p] for p in body),
        fast=fast,
        doc=doc,
        variables=tuple((local[p], terms.variables[p]) for p in body if p in terms.variables),
    )
    return function, used


def _is_axis(term: Term) -> bool:
    """True for a linear function of axes alone: a size or an index in memory may be any number."""
    if term.op is not Leaf.COORDINATE:
        return False
    index = sympy.sympify(term.payload)
    return not index.has(sympy.Function) and all(symbol.is_positive is None for symbol in index.free_symbols)


def _localized(term: Term, local: Mapping[int, int], is_given: bool) -> Term:
    """Renumbers a term for the function; a parameter becomes a scalar leaf, unless it is an index of the iteration space."""
    if is_given:
        return Term(Leaf.COORDINATE if _is_axis(term) else Leaf.SCALAR, (), term.dtype)
    return Term(term.op, tuple(local[a] for a in term.args), term.dtype, term.payload)
