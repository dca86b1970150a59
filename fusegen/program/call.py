"""The launch plan of a call: buffers and steps, with all sizes as formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from math import prod
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.lazy import dataclass
from fusegen.program.formula import Formula
from fusegen.program.numbers import Numbers
from fusegen.units import counted


class Role(Enum):
    """The role of a buffer for the caller. Random bits are not stored: kernels get the address of their key."""

    INPUT = "input"
    OUTPUT = "output"
    TEMPORARY = "temporary"
    RANDOM = "random"


@dataclass(frozen=True)
class Buffer:
    """A buffer of a call with its number. It is row-major unless it is an input."""

    key: int
    name: str
    dtype: DType
    shape: tuple[Formula, ...]
    role: Role


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled view of a buffer for TMA, outermost dim first.

    Attributes:
        buffer: key of the buffer.
        shape, strides: in elements.
        offset: elements from the buffer's start to the view's first element.
        box: the tile shape.
        writable: whether the kernel stores through it.
    """

    buffer: int
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    offset: Formula
    box: tuple[int, ...]
    writable: bool = False


@dataclass(frozen=True)
class MapArgument:
    """A tensor map, by its position in `KernelLaunch.tensor_maps`."""

    number: int


@dataclass(frozen=True)
class PointerArgument:
    """The address of a buffer; `writable` if the kernel writes there."""

    buffer: int
    writable: bool


@dataclass(frozen=True)
class SizeArgument:
    formula: Formula


@dataclass(frozen=True)
class ScalarArgument:
    """A run-time scalar, as a float or a 64-bit integer."""

    name: str
    is_float: bool


@dataclass(frozen=True)
class CounterArgument:
    """The number of the counter that a launch's blocks wait for, below `COUNTERS`. Launches that may run at the same time have
    different ones; each leaves its counter at zero."""


COUNTERS = 1 << 16
"""The counters of a kernel, four bytes each."""

LaunchArgument: TypeAlias = MapArgument | PointerArgument | SizeArgument | ScalarArgument | CounterArgument


@dataclass(frozen=True)
class RandomKey:
    """The key of a buffer of random bits: a number, or a tensor with one element. None draws one key per call from torch's
    generator, for all buffers."""

    buffer: int
    source: SizeArgument | ScalarArgument | PointerArgument | None


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a kernel.

    Attributes:
        block: threads per block.
        shared_bytes: dynamic shared memory per block.
        checks: whether the kernel reports indices out of range.
        cluster: blocks per cluster.
        overlaps: whether it may start before the previous launch ends (programmatic dependent launch).
    """

    tensor_maps: tuple[TensorMapSpec, ...]
    grid: Formula
    block: int
    shared_bytes: int
    arguments: tuple[LaunchArgument, ...]
    checks: bool = False
    cluster: int = 1
    overlaps: bool = False

    @property
    def waits(self) -> bool:
        """True if blocks wait for others of the launch."""
        return any(isinstance(argument, CounterArgument) for argument in self.arguments)

    @property
    def accesses(self) -> dict[int, bool]:
        """Maps each buffer that is read or written to whether it is written."""
        pointers = [a for a in self.arguments if isinstance(a, PointerArgument)]
        accesses = [*((p.buffer, p.writable) for p in pointers), *((m.buffer, m.writable) for m in self.tensor_maps)]
        written = {buffer for buffer, writable in accesses if writable}
        return {buffer: buffer in written for buffer, _ in accesses}


@dataclass(frozen=True)
class StridedOperand:
    """A view of a buffer for a library call."""

    buffer: int
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    offset: Formula


@dataclass(frozen=True)
class MatmulCall:
    """A matmul by torch (cuBLAS on a GPU): out = a @ b, or out += a @ b for 2D operands if ``adds`` is not 0."""

    a: StridedOperand
    b: StridedOperand
    out: StridedOperand
    adds: Formula

    @property
    def products(self) -> Formula:
        """The number of multiplications; the library starts no kernel for none."""
        return prod((*self.a.shape[1:], self.b.shape[-1]), start=self.a.shape[0])

    @property
    def accesses(self) -> dict[int, bool]:
        return {self.a.buffer: False, self.b.buffer: False, self.out.buffer: True}


@dataclass(frozen=True)
class LibraryResult:
    """A result of a torch function.

    Attributes:
        number: its position among the function's results.
        buffer: key of the buffer that holds it.
        order: the function's dims, in the order of the buffer's dims.
    """

    number: int
    buffer: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class LibraryCall:
    """A call of a torch function, which allocates its results. Settings are its literal arguments; unused results are left out."""

    function: str
    settings: tuple[float, ...]
    sizes: tuple[Formula, ...]
    operands: tuple[StridedOperand, ...]
    results: tuple[LibraryResult, ...]

    @property
    def accesses(self) -> dict[int, bool]:
        return {operand.buffer: False for operand in self.operands} | {result.buffer: True for result in self.results}


@dataclass(frozen=True)
class Loop:
    """A loop over blocks of rows, as large as the workspace limit allows.

    Attributes:
        body: the plan of a block. Its inputs are the loop's whole operands, and the results that it writes to.
        start, rows: names of the sizes that hold a block's first row and its number of rows.
        extent: number of rows in all blocks.
        operands: buffers that are the body's inputs, in order.
        zeros: operands that all blocks accumulate into; they are zeroed before the first block.
        results: operands that the body writes to.
        row_bytes: bytes of the body's temporaries per row.
        sum_bytes: bytes of all accumulated buffers.
    """

    body: LaunchPlan
    start: str
    rows: str
    extent: Formula
    operands: tuple[int, ...]
    zeros: tuple[int, ...]
    results: tuple[int, ...]
    row_bytes: Formula
    sum_bytes: Formula

    @property
    def accesses(self) -> dict[int, bool]:
        return {operand: operand in self.results for operand in self.operands}

    def blocks(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], ...]:
        """Returns the sizes of each block's call, given the values of all other sizes."""
        extent = self.extent(sizes)
        rows = rows_of_block(extent, self.row_bytes(sizes), self.sum_bytes(sizes))
        return tuple({**sizes, self.start: start, self.rows: min(rows, extent - start)} for start in range(0, extent, rows))


CallStep: TypeAlias = "KernelLaunch | MatmulCall | LibraryCall | Loop"


@dataclass(frozen=True)
class LaunchPlan:
    """The buffers and steps of a call.

    Attributes:
        inputs: keys of the input buffers, with their parameters' names.
        results: keys of the result buffers, in order.
        scalars: computes the kernels' scalars from the caller's numbers.
        counts: numbers of rows and of columns that kernels iterate over; they may exceed a buffer's number of elements.
        keys: one for each buffer of random bits.
    """

    buffers: tuple[Buffer, ...]
    inputs: tuple[tuple[int, str], ...]
    steps: tuple[CallStep, ...]
    results: tuple[int, ...]
    scalars: Numbers
    counts: tuple[Formula, ...] = ()
    keys: tuple[RandomKey, ...] = ()

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the inputs that are written to."""
        touched = {key for step in self.steps for key, is_written in step.accesses.items() if is_written}
        return tuple(position for position, (key, _) in enumerate(self.inputs) if key in touched)

    @property
    def library_allocated(self) -> frozenset[int]:
        return frozenset(result.buffer for step in self.steps if isinstance(step, LibraryCall) for result in step.results)

    @property
    def summary(self) -> str:
        """Describes the steps by their number and kind."""
        kinds = ((KernelLaunch, "kernel"), (MatmulCall, "library matmul"), (LibraryCall, "library call"), (Loop, "loop"))
        counts = [(sum(isinstance(step, kind) for step in self.steps), name) for kind, name in kinds]
        *first_items, last = [counted(count, name) for count, name in counts if count] or ["no kernel"]
        return f"{', '.join(first_items)} and {last}" if first_items else last

    @property
    def draws(self) -> bool:
        """True if it draws random bits from torch's generator, so that equal calls have different results."""
        return any(key.source is None for key in self.keys) or any(map(_draws_random, self.steps))

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Returns the largest number that kernels' indices must hold: elements of a buffer, rows or columns, or a size, which math
        may read of a tensor without elements."""
        elements = (math.prod(extent(sizes) for extent in buffer.shape) for buffer in self.buffers)
        looped = (step.body.largest(step.blocks(sizes)[0]) for step in self.steps if isinstance(step, Loop))
        return max((*elements, *looped, *sizes.values(), *(count(sizes) for count in self.counts)), default=0)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        return tuple(launch for step in self.steps for launch in launches_of(step))


_DROPOUT = 2  # index in the settings of attention


def _draws_random(step: CallStep) -> bool:
    if isinstance(step, Loop):
        return step.body.draws
    return isinstance(step, LibraryCall) and step.function == "attention" and step.settings[_DROPOUT] > 0


def launches_of(step: CallStep) -> tuple[KernelLaunch, ...]:
    """Returns the kernel launches of a step, including those in a loop's body."""
    if isinstance(step, Loop):
        return step.body.launches
    return (step,) if isinstance(step, KernelLaunch) else ()


# Rows per block of a loop.


MAX_BLOCK_BYTES = 256 << 20
"""Limit in bytes for the temporaries of a block with more than one row; half of the accumulated bytes is the limit if that is
more."""

ROW_MULTIPLE = 64
"""Blocks are multiples of this number of rows, if the limit allows."""


def rows_of_block(extent: int, row_bytes: int, sum_bytes: int) -> int:
    """Returns the rows per block of a loop: as many as the limit allows, in blocks of similar size. Each block reads and writes the
    accumulated `sum_bytes`."""
    most = max(max(MAX_BLOCK_BYTES, sum_bytes // 2) // max(row_bytes, 1), 1)
    if extent <= most:
        return extent
    count = -(-extent // most)
    even = -(-extent // count)
    rounded = -(-even // ROW_MULTIPLE) * ROW_MULTIPLE
    return rounded if rounded <= most else even


# The workspace of a call: one allocation that holds its temporaries, each during its live range. With a caching allocator like
# torch's, large temporaries are separate allocations, made at their first use and freed after the last.


_ALIGNMENT = 256  # bytes, like torch's allocator

SEPARATE_BYTES = 16 << 20
"""Bytes from which a temporary is allocated separately: an allocation takes 1 µs, writing the value at least 5 µs."""


@dataclass(frozen=True)
class BufferSlot:
    """The location of a temporary in the workspace.

    Attributes:
        offset, size: in bytes.
        shape: in elements.
        first, last: the steps of its live range.
    """

    key: int
    offset: int
    size: int
    shape: tuple[int, ...]
    first: int
    last: int

    def overlaps(self, other: BufferSlot) -> bool:
        """True if the live ranges overlap."""
        return self.first <= other.last and other.first <= self.last


_PACKING_ORDERS: tuple[Callable[[BufferSlot], tuple[int, ...]], ...] = (
    lambda slot: (-slot.size, slot.first, slot.key),
    lambda slot: (slot.first - slot.last, -slot.size, slot.key),
    lambda slot: (slot.first, -slot.size, slot.key),
)


def plan_workspace(call: LaunchPlan, sizes: Mapping[str, int]) -> tuple[tuple[BufferSlot, ...], int]:
    """Returns the workspace slots of a call's temporaries, and the workspace size in bytes. Library results are excluded."""
    return pack_slots(slots_of(call, sizes))


def bytes_of(call: LaunchPlan, sizes: Mapping[str, int]) -> int:
    """Returns the workspace bytes of a call, including loop bodies."""
    _, own = plan_workspace(call, sizes)
    bodies = ((step.body, step.blocks(sizes)) for step in call.steps if isinstance(step, Loop))
    return own + max((bytes_of(body, blocks[n]) for body, blocks in bodies for n in (0, -1)), default=0)


def peak_of(call: LaunchPlan, sizes: Mapping[str, int]) -> str:
    """Returns the peak bytes of live temporaries as a formula of sizes, or "" if it is 0.

    The formula is that of the step with the highest usage at `sizes`; at other sizes, another step may use more. The workspace
    rounds each value up to a multiple of 256 bytes.
    """
    slots = slots_of(call, sizes)
    steps = {slot.first for slot in slots}
    alive = max(([slot for slot in slots if slot.first <= step <= slot.last] for step in steps), key=_total, default=[])
    specs = {spec.key: spec for spec in call.buffers}
    terms: dict[tuple[str, ...], int] = {}
    for spec in (specs[slot.key] for slot in alive):
        literal = [extent for extent in spec.shape if not extent.sizes]
        symbols = tuple(sorted(str(extent * 1).removesuffix(" * 1") for extent in spec.shape if extent.sizes))
        terms[symbols] = terms.get(symbols, 0) + spec.dtype.itemsize * prod(extent(sizes) for extent in literal)
    sorted_terms = sorted(terms.items(), key=lambda term: (-len(term[0]), term))
    return " + ".join(" * ".join((str(factor), *symbols)) for symbols, factor in sorted_terms) if any(terms) else ""


def _total(slots: Iterable[BufferSlot]) -> int:
    return sum(slot.size for slot in slots)


def slots_of(call: LaunchPlan, sizes: Mapping[str, int]) -> tuple[BufferSlot, ...]:
    """Returns the temporaries of a call without offsets. Library results are excluded."""
    first, last = live_ranges(call)
    temporaries = (spec for spec in call.buffers if spec.role is Role.TEMPORARY and spec.key not in call.library_allocated)
    return tuple(_unplaced_slot(spec, first[spec.key], last[spec.key], sizes) for spec in temporaries)


def live_ranges(call: LaunchPlan) -> tuple[dict[int, int], dict[int, int]]:
    """Maps each buffer to the first step that accesses it, and to the last."""
    touched = [(key, number) for number, step in enumerate(call.steps) for key in step.accesses]
    return {key: number for key, number in reversed(touched)}, dict(touched)


def pack_slots(slots: Iterable[BufferSlot]) -> tuple[tuple[BufferSlot, ...], int]:
    """Assigns offsets so that live temporaries do not overlap. Returns the slots and the total bytes.

    First fit, in the best of three orders: by size, by length of the live range, or by first step. The result is close to the lower
    bound, the peak of live bytes.
    """
    slots = tuple(slots)
    arranged = (_first_fit(sorted(slots, key=order)) for order in _PACKING_ORDERS)
    return min(arranged, key=lambda candidate: candidate[1])


def _first_fit(slots: Iterable[BufferSlot]) -> tuple[tuple[BufferSlot, ...], int]:
    placed: list[BufferSlot] = []
    for slot in slots:
        offset = 0
        for neighbor in sorted((o for o in placed if o.overlaps(slot)), key=lambda o: o.offset):
            if offset + slot.size <= neighbor.offset:
                break
            offset = max(offset, _aligned(neighbor.offset + neighbor.size))
        placed.append(replace(slot, offset=offset))
    return tuple(sorted(placed, key=lambda s: s.key)), max((_aligned(s.offset + s.size) for s in placed), default=0)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _unplaced_slot(spec: Buffer, first: int, last: int, sizes: Mapping[str, int]) -> BufferSlot:
    shape = tuple(extent(sizes) for extent in spec.shape)
    return BufferSlot(spec.key, 0, spec.dtype.itemsize * prod(shape), shape, first, last)
