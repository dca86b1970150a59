"""Kernels: what is launched, with the buffers, sizes and scalars that it gets, and its math functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from fusegen.dtypes import DType
from fusegen.ir.symbolic import Dim
from fusegen.schedule.math import Fast, MathFunction, MathParameter, MathResult
from fusegen.schedule.terms import Leaf, Term, Terms

SCRATCH_BYTES = 8
"""Bytes of an element of a state that threads exchange: the widest type."""
BARRIER_BYTES = 8
BANKS = 32  # of 4 bytes
_MULTIPLE = 8  # elements of an array, so that the next one is aligned


@dataclass(frozen=True)
class SharedArrays:
    """The offsets of arrays, in bytes.

    Attributes:
        scratch: by which threads exchange components of states.
        ordered: by which threads exchange rows that they put in order.
        sums: to which the row groups of a block add components of column sums.
        staged: fragments of rows.
        barriers: each of which counts what other blocks send for one reduction.
        bytes: of all arrays.
    """

    scratch: tuple[int, ...]
    ordered: tuple[int, ...]
    sums: tuple[int, ...]
    staged: tuple[int, ...]
    barriers: tuple[int, ...]
    bytes: int


def padded(elements: int) -> int:
    """The room for elements of which those behind each turn of the banks lie one further: threads that store neighbours each, one
    after the other, meet in no bank then."""
    room = elements + elements // BANKS
    return -(-room // _MULTIPLE) * _MULTIPLE


def arranged(
    scratch: Sequence[int] = (),
    sums: Sequence[int] = (),
    staged: Sequence[int] = (),
    barriers: Sequence[int] = (),
    ordered: Sequence[int] = (),
) -> SharedArrays:
    """Arrays of some bytes each, in the order of `SharedArrays`."""
    ends = tuple(accumulate((0, *scratch, *ordered, *sums, *staged, *barriers)))
    first, behind = len(scratch), len(scratch) + len(ordered)
    last = behind + len(sums)
    above = last + len(staged)
    return SharedArrays(ends[:first], ends[first:behind], ends[behind:last], ends[last:above], ends[above:-1], ends[-1])


@dataclass(frozen=True)
class Plan:
    """The layout of a kernel on the machine: a frozen dataclass a pipeline, chosen by pure heuristics.

    Attributes:
        fixes_threads: whether its threads a block are its own; else they can be as many as those of launches beside it.
    """

    fixes_threads: ClassVar[bool] = True

    @property
    def traits(self) -> tuple[str, tuple[float, ...]]:
        """Its traits beside sizes, to find the nearest candidate: a kind, and numbers of which a factor of two counts as one."""
        raise NotImplementedError(type(self).__name__)

    @property
    def words(self) -> str:
        """A description that tells it from the other candidates."""
        raise NotImplementedError(type(self).__name__)


class Body:
    """The content of a kernel: its math functions, accesses and plan; a frozen dataclass for each pipeline.

    Attributes:
        plan: its layout.
        can_be_part: whether it needs nothing but its blocks, so that several launches can be parts of one.
    """

    plan: Plan
    can_be_part: ClassVar[bool] = False

    @property
    def chosen(self) -> Plan | None:
        """The plan, where it is one of several that would do."""
        return None

    @property
    def cluster(self) -> int:
        """Blocks that can reach each other's shared memory."""
        return 1

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that registers must leave room for on a multiprocessor."""
        return 1

    @property
    def counts(self) -> tuple[Dim, ...]:
        """The numbers of rows and columns that it goes through, where it reduces or scans them."""
        return ()

    @property
    def tile_dtypes(self) -> frozenset[DType]:
        """Types of what comes and leaves tile by tile, of which there may be no pointer."""
        return frozenset()

    @property
    def reason(self) -> str:
        """The reason for its layout on a GPU; empty where the plan says it all."""
        return ""

    def words(self, kind: str) -> str:
        """A description of the kernel and its layout.

        Args:
            kind: of the group that it computes, in words.
        """
        return kind


@dataclass(frozen=True)
class Pointer:
    """A buffer that a kernel gets.

    Attributes:
        buffer: its key.
        name: in the text.
        dtype: of its elements.
        stream: of random bits, which of those of one key they are: the address is that of the key. None of what lies in memory.
    """

    buffer: int
    name: str
    dtype: DType
    writable: bool
    stream: int | None = None


@dataclass(frozen=True, repr=False)
class LoweredKernel:
    """All that emission needs of one kernel.

    Attributes:
        name: the user's name for it; the symbol is ``fg_`` and the name.
        pointers: buffers, in the order of the parameters.
        sizes: names of sizes and strides, in the order of the parameters.
        scalars: run-time scalars, in the order of the parameters.
        body: the math and the pipeline's particulars.
        wide: whether indices need 64 bits.
        checks: whether it checks indices that it reads.
    """

    name: str
    pointers: tuple[Pointer, ...]
    sizes: tuple[str, ...]
    scalars: tuple[tuple[str, DType], ...]
    body: Body
    wide: bool = False
    checks: bool = False

    def __repr__(self) -> str:
        return f"<kernel {self.name}: {type(self.body).__name__}>"


# Cuts math functions out of the terms of a kernel.


def cut(
    terms: Terms, name: str, roots: Sequence[tuple[str, int]], given: Mapping[int, MathParameter], *, fast: Fast, doc: str = ""
) -> tuple[MathFunction, tuple[int, ...]]:
    """A function that computes some terms from others.

    Args:
        terms: the kernel's terms.
        name: the function's name.
        roots: names and positions of the results.
        given: terms that are parameters; where several terms share one (lanes), its name is the whole expression.
        fast: which approximate functions may be used.
        doc: one line that says what it is.

    Returns:
        The function, and the given terms that it really uses, in the order of its parameters.
    """
    stop = frozenset(given)
    body = terms.below(tuple(t for _, t in roots), stop)
    local = {position: k for k, position in enumerate(body)}
    used = tuple(p for p in given if p in local)
    moved = tuple(_localized(terms.items[p], local, p in stop) for p in body)
    parameters = dict.fromkeys(given[p] for p in used)
    function = MathFunction(
        name=name,
        parameters=tuple(parameters),
        terms=moved,
        leaves=tuple((local[p], given[p].name) for p in used),
        results=tuple(MathResult(n, local[t], terms.items[t].dtype) for n, t in roots),
        locations=tuple(terms.locations[p] for p in body),
        fast=fast,
        doc=doc,
    )
    return function, used


def _localized(term: Term, local: Mapping[int, int], is_given: bool) -> Term:
    """A term in the function's own numbering, without what only the kernel knows of a leaf."""
    if is_given:
        return Term(Leaf.SCALAR, (), term.dtype)
    return Term(term.op, tuple(local[a] for a in term.args), term.dtype, term.payload)
