"""The steps of one call, with every size as a formula: all that runs it, beside the kernels themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.program.formula import Formula
from fusegen.program.numbers import Numbers


class Role(Enum):
    """The role of a buffer for the caller. Random bits are in no memory: what kernels get is the address of their key."""

    INPUT = "input"
    OUTPUT = "output"
    TEMPORARY = "temporary"
    RANDOM = "random"


@dataclass(frozen=True)
class Buffer:
    """A buffer of a call: row-major unless it is an input.

    Attributes:
        key: its number.
        name: in emitted text and explanations.
        shape: sizes as formulas.
        role: an input's tensor, a result, or memory of the call's own.
    """

    key: int
    name: str
    dtype: DType
    shape: tuple[Formula, ...]
    role: Role


@dataclass(frozen=True)
class TensorMapSpec:
    """A tile-wise view of a buffer for the tensor memory accelerator, outermost dim first.

    Attributes:
        buffer: its key.
        shape, strides: in elements.
        offset: of the first element from the buffer's, in elements.
        box: the tile.
        writable: whether results leave by it.
    """

    buffer: int
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    offset: Formula
    box: tuple[int, ...]
    writable: bool = False


@dataclass(frozen=True)
class MapArgument:
    """A tensor map, by its number."""

    number: int


@dataclass(frozen=True)
class PointerArgument:
    """The address of a buffer, and whether the kernel writes there."""

    buffer: int
    writable: bool


@dataclass(frozen=True)
class SizeArgument:
    """An integer."""

    formula: Formula


@dataclass(frozen=True)
class ScalarArgument:
    """A run-time scalar, as a float or an integer of 64 bits."""

    name: str
    is_float: bool


LaunchArgument: TypeAlias = MapArgument | PointerArgument | SizeArgument | ScalarArgument


@dataclass(frozen=True)
class RandomKey:
    """The source of random bits.

    Attributes:
        buffer: the random bits.
        source: a number, or a tensor of one; None where each call draws it from torch's generator, one for all buffers.
    """

    buffer: int
    source: SizeArgument | ScalarArgument | PointerArgument | None


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a kernel.

    Attributes:
        tensor_maps: those that the arguments name.
        grid: number of blocks.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: in the order of the kernel's parameters.
        checks: whether the kernel says of an index that it read that it names no element.
        cluster: blocks that run together, as the kernel's text says too.
        overlaps: whether it is launched while the launch before it still runs; its text waits for that before it touches memory.
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
    def touched(self) -> dict[int, bool]:
        """The buffers that it reads or writes, each with whether it is written."""
        pointers = [a for a in self.arguments if isinstance(a, PointerArgument)]
        found = [*((p.buffer, p.writable) for p in pointers), *((m.buffer, m.writable) for m in self.tensor_maps)]
        written = {buffer for buffer, writable in found if writable}
        return {buffer: buffer in written for buffer, _ in found}


@dataclass(frozen=True)
class StridedOperand:
    """A view of a buffer for a library call."""

    buffer: int
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    offset: Formula


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product by torch (cuBLAS on a GPU): out = a @ b.

    Attributes:
        adds: not 0 where it is added to what is there, all of which are matrices.
    """

    a: StridedOperand
    b: StridedOperand
    out: StridedOperand
    adds: Formula

    @property
    def touched(self) -> dict[int, bool]:
        """As of a launch."""
        return {self.a.buffer: False, self.b.buffer: False, self.out.buffer: True}


@dataclass(frozen=True)
class LibraryResult:
    """A result of a function of torch.

    Attributes:
        number: which of its results.
        buffer: that it becomes.
        order: the function's dims in the order in which they lie there.
    """

    number: int
    buffer: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class LibraryCall:
    """A function of torch, which allocates its results itself.

    Attributes:
        settings: its arguments that are literal numbers.
        sizes: those that are sizes.
        results: those of its results that are wanted.
    """

    function: str
    settings: tuple[float, ...]
    sizes: tuple[Formula, ...]
    operands: tuple[StridedOperand, ...]
    results: tuple[LibraryResult, ...]

    @property
    def touched(self) -> dict[int, bool]:
        """As of a launch."""
        return {operand.buffer: False for operand in self.operands} | {result.buffer: True for result in self.results}


@dataclass(frozen=True)
class Loop:
    """A call for each block of rows: of as many as its workspace has room for.

    Attributes:
        body: the call, of the loop's operands, whole, and behind them its results, to which it writes.
        start, rows: the sizes by which it knows the block: the first row, and how many there are.
        extent: rows of all blocks.
        operands: the buffers that are the body's inputs, in order.
        zeros: those of them that are zeroed first, since all blocks add to them.
        results: those to which it writes.
        row_bytes: of the body's own values, for each row.
        sum_bytes: of all that blocks add to.
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
    def touched(self) -> dict[int, bool]:
        """As of a launch."""
        return {operand: operand in self.results for operand in self.operands}

    def blocks(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], ...]:
        """The sizes of each block's call.

        Args:
            sizes: values of all other sizes.
        """
        extent = self.extent(sizes)
        rows = rows_of_block(extent, self.row_bytes(sizes), self.sum_bytes(sizes))
        return tuple({**sizes, self.start: start, self.rows: min(rows, extent - start)} for start in range(0, extent, rows))


CallStep: TypeAlias = "KernelLaunch | MatrixProduct | LibraryCall | Loop"


@dataclass(frozen=True)
class LaunchPlan:
    """The steps of one call.

    Attributes:
        buffers: all buffers.
        inputs: keys of those that are the caller's tensors, with the names of their parameters.
        steps: in order.
        results: keys of the buffers that are the results, in order.
        scalars: what kernels get for their scalars, computed of the caller's numbers.
        counts: how many rows, and how many columns, kernels go through; there may be more than any buffer has elements.
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
        """The inputs that are written to, by their places among the inputs."""
        touched = {key for step in self.steps for key, is_written in step.touched.items() if is_written}
        return tuple(place for place, (key, _) in enumerate(self.inputs) if key in touched)

    @property
    def made(self) -> frozenset[int]:
        """Buffers that a library allocates."""
        return frozenset(result.buffer for step in self.steps if isinstance(step, LibraryCall) for result in step.results)

    @property
    def described(self) -> str:
        """The number of its steps by kind, in words."""
        kinds = ((KernelLaunch, "kernel"), (MatrixProduct, "library product"), (LibraryCall, "library call"), (Loop, "loop"))
        counts = [(sum(isinstance(step, kind) for step in self.steps), name) for kind, name in kinds]
        *others, last = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count] or ["no kernel"]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def draws(self) -> bool:
        """Tells if it draws random bits from torch's generator: two calls with the same tensors give other results."""
        return any(key.source is None for key in self.keys) or any(map(_draws, self.steps))

    def largest(self, sizes: Mapping[str, int]) -> int:
        """The largest number that indices of kernels must hold: of a buffer's elements, of rows or of columns.

        Args:
            sizes: values of all sizes.
        """
        elements = (math.prod(extent(sizes) for extent in buffer.shape) for buffer in self.buffers)
        looped = (step.body.largest(step.blocks(sizes)[0]) for step in self.steps if isinstance(step, Loop))
        return max((*elements, *looped, *(count(sizes) for count in self.counts)), default=0)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """The kernel launches, those of loops among them."""
        return tuple(launch for step in self.steps for launch in launches_of(step))


_DROPOUT = 2  # of the settings of attention


def _draws(step: CallStep) -> bool:
    if isinstance(step, Loop):
        return step.body.draws
    return isinstance(step, LibraryCall) and step.function == "attention" and step.settings[_DROPOUT] > 0


def launches_of(step: CallStep) -> tuple[KernelLaunch, ...]:
    """The kernel launches of a step; of a loop, those of its body."""
    if isinstance(step, Loop):
        return step.body.launches
    return (step,) if isinstance(step, KernelLaunch) else ()


# The number of rows of a loop's blocks.


ROOM = 256 << 20
"""Bytes that the values of a block's rows may take, where they are more than one; half of what blocks add to is no more either."""

EVEN = 64
"""The number of rows of which a block is a multiple, where it is one of several and there is room."""


def rows_of_block(extent: int, row_bytes: int, sum_bytes: int) -> int:
    """The rows of each block but the last: as many as there is room for, in blocks of about one size.

    Args:
        extent: rows of all blocks.
        row_bytes: that the values of a row take.
        sum_bytes: of what blocks add to: the larger that is, the fewer times it should be read and written.
    """
    most = max(max(ROOM, sum_bytes // 2) // max(row_bytes, 1), 1)
    if extent <= most:
        return extent
    count = -(-extent // most)
    even = -(-extent // count)
    rounded = -(-even // EVEN) * EVEN
    return rounded if rounded <= most else even


# The workspace of a call: one piece of memory in which values lie that only its steps know, each as long as it is needed.
#
# Large ones have memory of their own there where an allocator keeps what it is given back, as torch's does: they take none before
# the step that makes them, and none behind the last that reads them.


_ALIGNMENT = 256  # bytes between values; what torch's allocator gives

APART = 16 << 20
"""Bytes from which a value has memory of its own: to ask for that takes a microsecond, to write it five and more."""


@dataclass(frozen=True)
class BufferSlot:
    """A value's place.

    Attributes:
        key: of the buffer.
        offset, size: in bytes.
        shape: in elements.
        first, last: the steps between which it is needed.
    """

    key: int
    offset: int
    size: int
    shape: tuple[int, ...]
    first: int
    last: int

    def meets(self, other: BufferSlot) -> bool:
        """Tells if both are needed in one step."""
        return self.first <= other.last and other.first <= self.last


_ORDERS: tuple[Callable[[BufferSlot], tuple[int, ...]], ...] = (
    lambda slot: (-slot.size, slot.first, slot.key),
    lambda slot: (slot.first - slot.last, -slot.size, slot.key),
    lambda slot: (slot.first, -slot.size, slot.key),
)


def arrange(call: LaunchPlan, sizes: Mapping[str, int]) -> tuple[tuple[BufferSlot, ...], int]:
    """The places of a call's temporaries, but for what a library allocates, and the bytes that they take together."""
    return packed(slots_of(call, sizes))


def bytes_of(call: LaunchPlan, sizes: Mapping[str, int]) -> int:
    """The bytes of all temporaries of a call, those of its loops' bodies among them."""
    _, own = arrange(call, sizes)
    bodies = ((step.body, step.blocks(sizes)) for step in call.steps if isinstance(step, Loop))
    return own + max((bytes_of(body, blocks[n]) for body, blocks in bodies for n in (0, -1)), default=0)


def peak_of(call: LaunchPlan, sizes: Mapping[str, int]) -> str:
    """The bytes of the temporaries that a call needs at once, as a formula of its sizes; nothing where they depend on none.

    The step at which they are most is that of the sizes given. The workspace is that, each value rounded up to a multiple of 256.
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
    found = sorted(terms.items(), key=lambda term: (-len(term[0]), term))
    return " + ".join(" * ".join((str(factor), *symbols)) for symbols, factor in found) if any(terms) else ""


def _total(slots: Iterable[BufferSlot]) -> int:
    return sum(slot.size for slot in slots)


def slots_of(call: LaunchPlan, sizes: Mapping[str, int]) -> tuple[BufferSlot, ...]:
    """A call's temporaries, but for what a library allocates, that have no places yet."""
    first, last = spans(call)
    found = (spec for spec in call.buffers if spec.role is Role.TEMPORARY and spec.key not in call.made)
    return tuple(_slot(spec, first[spec.key], last[spec.key], sizes) for spec in found)


def spans(call: LaunchPlan) -> tuple[dict[int, int], dict[int, int]]:
    """The first step that touches a buffer, and the last one, by its key."""
    touched = [(key, number) for number, step in enumerate(call.steps) for key in step.touched]
    return {key: number for key, number in reversed(touched)}, dict(touched)


def packed(slots: Iterable[BufferSlot]) -> tuple[tuple[BufferSlot, ...], int]:
    """Values in places of their own as long as they are needed, and the bytes that they take together.

    One after the other, each as far in front as those that are needed at the same time let it: the largest first, or those that
    are needed longest, or as they come, whichever takes the least. That is near the largest sum of values that are needed at once,
    which no arrangement is below.
    """
    slots = tuple(slots)
    arranged = (_placed(sorted(slots, key=order)) for order in _ORDERS)
    return min(arranged, key=lambda found: found[1])


def _placed(slots: Iterable[BufferSlot]) -> tuple[tuple[BufferSlot, ...], int]:
    placed: list[BufferSlot] = []
    for slot in slots:
        offset = 0
        for other in sorted((o for o in placed if o.meets(slot)), key=lambda o: o.offset):
            if offset + slot.size <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.size))
        placed.append(replace(slot, offset=offset))
    return tuple(sorted(placed, key=lambda s: s.key)), max((_aligned(s.offset + s.size) for s in placed), default=0)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _slot(spec: Buffer, first: int, last: int, sizes: Mapping[str, int]) -> BufferSlot:
    shape = tuple(extent(sizes) for extent in spec.shape)
    return BufferSlot(spec.key, 0, spec.dtype.itemsize * prod(shape), shape, first, last)
