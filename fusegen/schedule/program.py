"""Programs: what one call does, step by step, with every size as a formula."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.ir.formula import Formula
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.passes.fuse import Group
from fusegen.schedule.kernel import Kernel
from fusegen.target import Target


class Role(Enum):
    """What a buffer is to the caller."""

    INPUT = "input"
    OUTPUT = "output"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a call: row-major unless it is an input.

    Attributes:
        key: its number.
        name: in emitted text and explanations.
        shape: sizes as formulas.
        role: an input's tensor, a result, or memory of the call's own.
        node: the value that it holds, in the value's shape; None for what only one group knows.
    """

    key: int
    name: str
    dtype: DType
    shape: tuple[Formula, ...]
    role: Role
    node: int | None = None


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
class Traffic:
    """Bytes that a step must move at least: each operand once."""

    read: Formula
    written: Formula


@dataclass(frozen=True)
class MapArgument:
    """A tensor map, by its number."""

    number: int


@dataclass(frozen=True)
class PointerArgument:
    """The address of a buffer."""

    buffer: int


@dataclass(frozen=True)
class SizeArgument:
    """An integer."""

    formula: Formula


@dataclass(frozen=True)
class ScalarArgument:
    """A run-time scalar."""

    name: str


LaunchArgument: TypeAlias = MapArgument | PointerArgument | SizeArgument | ScalarArgument


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: what is launched.
        group: what it computes.
        tensor_maps: its first parameters.
        grid: number of blocks.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        traffic: bytes moved.
        extra: formulas of sizes that come before the kernel's own size parameters.
    """

    kernel: Kernel
    group: Group
    tensor_maps: tuple[TensorMapSpec, ...]
    grid: Formula
    block: int
    shared_bytes: int
    traffic: Traffic
    extra: tuple[Formula, ...] = ()

    @property
    def arguments(self) -> tuple[LaunchArgument, ...]:
        """The kernel's arguments in the order of its parameters: tensor maps, extra sizes, buffers, sizes, scalars."""
        return (
            *map(MapArgument, range(len(self.tensor_maps))),
            *map(SizeArgument, self.extra),
            *(PointerArgument(p.buffer) for p in self.kernel.pointers),
            *(SizeArgument(Formula(name)) for name in self.kernel.sizes),
            *(ScalarArgument(name) for name, _ in self.kernel.scalars),
        )


@dataclass(frozen=True)
class StridedOperand:
    """A view of a buffer for a library call."""

    buffer: int
    shape: tuple[Formula, ...]
    strides: tuple[Formula, ...]
    offset: Formula


@dataclass(frozen=True)
class LibraryProduct:
    """A matrix product by torch (cuBLAS on a GPU): out = a @ b."""

    a: StridedOperand
    b: StridedOperand
    out: StridedOperand
    group: Group
    traffic: Traffic
    reason: str = ""


Step: TypeAlias = Launch | LibraryProduct


@dataclass(frozen=True)
class ResultView:
    """A result as the caller gets it: a buffer's elements in the result's shape."""

    buffer: int
    shape: tuple[Formula, ...]


@dataclass(frozen=True)
class Program:
    """What one call does.

    Attributes:
        graph: in primitives; nodes of steps refer to it.
        target: the machine that it is for.
        buffers: all buffers.
        steps: in order.
        results: in order.
    """

    graph: Graph
    target: Target
    buffers: tuple[BufferSpec, ...]
    steps: tuple[Step, ...]
    results: tuple[ResultView, ...]

    @property
    def inputs(self) -> tuple[tuple[int, str], ...]:
        """The buffers of the graph's inputs, with their names."""
        named = {position: str(node.attr("name")) for position, node in self.graph if node.op is Op.INPUT}
        return tuple((spec.key, named[spec.node]) for spec in self.buffers if spec.node in named and spec.role is Role.INPUT)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel launches."""
        return tuple(step for step in self.steps if isinstance(step, Launch))
