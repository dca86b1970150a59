"""Programs: the steps of one call with what they were made of; `Program.call` is the part that runs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias, cast

import sympy

from fusegen.fusion.groups import Group, computed
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula, numbers_of
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import memory_shape
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, product, simplify_dim
from fusegen.program.call import (
    Buffer,
    CallStep,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    LibraryResult,
    Loop,
    MapArgument,
    MatrixProduct,
    PointerArgument,
    RandomKey,
    Role,
    ScalarArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.program.formula import Formula, formula_of, size
from fusegen.program.numbers import Numbers
from fusegen.schedule.kernel import LoweredKernel, Plan
from fusegen.schedule.names import scalar_identifier
from fusegen.target import Target
from fusegen.threads import cached_property


@dataclass(frozen=True)
class BufferSpec(Buffer):
    """A buffer of a program.

    Attributes:
        node: the value that it holds, in the value's shape; None for what only one group knows.
    """

    node: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step must move at least: each operand once."""

    read: Formula
    written: Formula

    def moved(self, sizes: Mapping[str, int]) -> int:
        """All bytes at some sizes."""
        return self.read(sizes) + self.written(sizes)


@dataclass(frozen=True, repr=False)
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
        candidates: the plans that it could have, that which is expected to be fastest first; none where there is one way alone.
        overlaps: whether it is launched while the launch before it still runs, and waits for that itself.
        part: 0 of a launch of its own; else its number, from 1, among the parts of one launch, of which each has a range of blocks.
    """

    kernel: LoweredKernel
    group: Group
    tensor_maps: tuple[TensorMapSpec, ...]
    grid: Formula
    block: int
    shared_bytes: int
    traffic: Traffic
    extra: tuple[Formula, ...] = ()
    candidates: tuple[Plan, ...] = ()
    overlaps: bool = False
    part: int = 0

    def __repr__(self) -> str:
        return f"<launch of {self.kernel.name}: {self.group.kind.name}, grid {self.grid}, block {self.block}>"

    @property
    def words(self) -> str:
        """A description of its kernel and layout."""
        return self.kernel.body.words(self.group.kind.name)

    @property
    def plan(self) -> Plan | None:
        """The plan that was chosen of several."""
        return self.kernel.body.chosen

    @property
    def cluster(self) -> int:
        """Blocks that can reach each other's shared memory."""
        return self.kernel.body.cluster

    @property
    def call(self) -> KernelLaunch:
        """The instruction that runs it: its kernel's arguments are tensor maps, extra sizes, buffers, sizes, scalars."""
        arguments: tuple[LaunchArgument, ...] = (
            *map(MapArgument, range(len(self.tensor_maps))),
            *map(SizeArgument, self.extra),
            *(PointerArgument(p.buffer, p.writable) for p in self.kernel.pointers),
            *(SizeArgument(size(name)) for name in self.kernel.sizes),
            *(ScalarArgument(name, dtype.is_float) for name, dtype in self.kernel.scalars),
        )
        layout = (self.tensor_maps, self.grid, self.block, self.shared_bytes)
        return KernelLaunch(*layout, arguments, self.kernel.checks, self.cluster, self.overlaps)


def is_of_one_block(launch: Launch) -> bool:
    """True if a launch has one block whatever the sizes are."""
    return launch.grid == formula_of(1)


def whole_launch(parts: Sequence[Launch]) -> Launch:
    """The launch of several parts: their blocks behind each other, their parameters once. The first parameters are the numbers of
    blocks of all parts but the last."""
    first = parts[0]
    kernels = [part.kernel for part in parts]
    kernel = LoweredKernel(
        f"{first.kernel.name}_to_{parts[-1].kernel.name.rpartition('_')[2]}",
        tuple(dict.fromkeys(pointer for kernel in kernels for pointer in kernel.pointers)),
        tuple(dict.fromkeys(name for kernel in kernels for name in kernel.sizes)),
        tuple(dict.fromkeys(scalar for kernel in kernels for scalar in kernel.scalars)),
        first.kernel.body,
        any(kernel.wide for kernel in kernels),
        any(kernel.checks for kernel in kernels),
    )
    grids = [part.grid for part in parts]
    return Launch(
        kernel,
        first.group,
        (),
        reduce(operator.add, grids),
        first.block,
        max(part.shared_bytes for part in parts),
        Traffic(reduce(operator.add, (p.traffic.read for p in parts)), reduce(operator.add, (p.traffic.written for p in parts))),
        extra=tuple(grids[:-1]),
        overlaps=first.overlaps,
    )


@dataclass(frozen=True, repr=False)
class LibraryProduct:
    """A matrix product by torch (cuBLAS on a GPU): out = a @ b, or added to what is there.

    Attributes:
        a, b, out: where the matrices lie.
        group: what it computes.
        traffic: bytes moved.
        reason: why no kernel of ours computes it.
        adds: True if it is added to what is there.
        padded: elements between rows in memory, of operands and results whose rows are padded there.
    """

    a: StridedOperand
    b: StridedOperand
    out: StridedOperand
    group: Group
    traffic: Traffic
    reason: str = ""
    adds: bool = False
    padded: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<torch.matmul of the library{f': {self.reason}' if self.reason else ''}>"

    @property
    def call(self) -> MatrixProduct:
        """The instruction that runs it."""
        return MatrixProduct(self.a, self.b, self.out, formula_of(int(self.adds)))


@dataclass(frozen=True, repr=False)
class LibraryStep:
    """A function of torch, which allocates its results.

    Attributes:
        function: its name.
        settings: its arguments that are literal numbers.
        sizes: those that are sizes.
        operands: its tensors.
        results: those of its results that are wanted.
        shapes: of these, where they lie.
        group: what it computes.
        traffic: bytes moved.
    """

    function: str
    settings: tuple[float, ...]
    sizes: tuple[Formula, ...]
    operands: tuple[StridedOperand, ...]
    results: tuple[LibraryResult, ...]
    shapes: tuple[tuple[Formula, ...], ...]
    group: Group
    traffic: Traffic

    def __repr__(self) -> str:
        return f"<{self.function} of the library>"

    @property
    def call(self) -> LibraryCall:
        """The instruction that runs it."""
        return LibraryCall(self.function, self.settings, self.sizes, self.operands, self.results)


@dataclass(frozen=True, repr=False)
class LoopStep:
    """A loop over blocks of rows.

    Attributes:
        blocks: what it does.
        body: the program of a block.
        row_bytes: of the values that it keeps for itself, for each row, if no loop inside of it makes them fewer.
        operands: buffers that are the body's inputs, in order: operands, and behind them results.
        group: what it computes.
        traffic: bytes moved.
    """

    blocks: Blocks
    body: Program
    row_bytes: Formula
    operands: tuple[int, ...]
    group: Group
    traffic: Traffic

    def __repr__(self) -> str:
        return f"<loop over rows of {self.body!r}>"

    @property
    def call(self) -> Loop:
        """The instruction that runs it."""
        results = self.operands[len(self.blocks.operands) :]
        sums = tuple(result for result, is_sum in zip(results, self.blocks.sums, strict=True) if is_sum)
        extent = formula(self.blocks.extent)
        start, rows = self.blocks.start.name, self.blocks.rows.name
        given = dict(zip(self.operands, (key for key, _ in self.body.inputs), strict=True))
        added = {given[result]: result for result in sums if _is_added_by_one(self.body, given[result])}
        body = replace(self.body.call, steps=tuple(_adding_from(step, size(start), added) for step in self.body.call.steps))
        zeros = tuple(result for result in sums if result not in added.values())
        return Loop(body, start, rows, extent, self.operands, zeros, results, self.row_bytes, sum_bytes(self.blocks))


Step: TypeAlias = "Launch | LibraryProduct | LibraryStep | LoopStep"


@dataclass(frozen=True, repr=False)
class Program:
    """The steps of one call.

    Attributes:
        graph: in primitives; nodes of steps refer to it.
        target: the machine that it is for.
        buffers: all buffers.
        steps: in order.
        results: keys of their buffers, in order.
    """

    graph: Graph
    target: Target
    buffers: tuple[BufferSpec, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def __repr__(self) -> str:
        steps = "".join(f"\n  {number}. {step!r}" for number, step in enumerate(self.steps, 1))
        return f"<program of {self.graph.name} for {self.target.name}, {len(self.buffers)} buffers>{steps}"

    @property
    def inputs(self) -> tuple[tuple[int, str], ...]:
        """The buffers of the graph's inputs, with their names."""
        named = {position: str(node.attr("name")) for position, node in self.graph if node.op is Op.INPUT}
        return tuple((spec.key, named[spec.node]) for spec in self.buffers if spec.node in named and spec.role is Role.INPUT)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel launches, but for those of loops."""
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> tuple[tuple[Launch, ...], ...]:
        """The parts of each kernel that is launched, those of loops among them, in order; most kernels have one."""
        found: list[tuple[Launch, ...]] = []
        for step in self._together:
            if isinstance(step, LoopStep):
                found += step.body.kernels
            elif isinstance(step, tuple):
                found.append(step)
        return tuple(found)

    @property
    def numbered(self) -> tuple[tuple[str, Step], ...]:
        """The steps with their numbers: ``2.``, or ``2.1`` of the first part of a launch."""
        found = []
        for number, step in enumerate(self._together, 1):
            parts = step if isinstance(step, tuple) else (step,)
            found += [(f"{number}." if len(parts) == 1 else f"{number}.{place}", part) for place, part in enumerate(parts, 1)]
        return tuple(found)

    @property
    def _together(self) -> tuple[tuple[Launch, ...] | LibraryProduct | LibraryStep | LoopStep, ...]:
        """The steps, launches by the kernel that they are parts of."""
        found: list[tuple[Launch, ...] | LibraryProduct | LibraryStep | LoopStep] = []
        for step in self.steps:
            before = found[-1] if found else None
            if not isinstance(step, Launch):
                found.append(step)
            elif step.part > 1 and isinstance(before, tuple):
                found[-1] = (*before, step)
            else:
                found.append((step,))
        return tuple(found)

    @cached_property
    def call(self) -> LaunchPlan:
        """The instructions that run it, without what it was made of."""
        derived = numbers_of(self.graph.derived)
        return LaunchPlan(
            buffers=tuple(Buffer(b.key, b.name, b.dtype, b.shape, b.role) for b in self.buffers),
            inputs=self.inputs,
            steps=tuple(_call_of(step) for step in self._together),
            results=self.results,
            scalars=Numbers(derived.lines, tuple((scalar_identifier(name), place) for name, place in derived.results)),
            counts=tuple(dict.fromkeys(count for launch in self.launches for count in map(formula, launch.kernel.body.counts))),
            keys=tuple(RandomKey(b.key, self._key_source(b)) for b in self.buffers if b.role is Role.RANDOM),
        )

    def _key_source(self, random: BufferSpec) -> SizeArgument | ScalarArgument | PointerArgument | None:
        assert random.node is not None
        operands = self.graph.nodes[random.node].args
        if not operands:
            return None
        key = self.graph.nodes[operands[0]]
        if key.op is Op.SCALAR:
            return ScalarArgument(scalar_identifier(str(key.attr("name"))), is_float=False)
        if key.op is Op.CONSTANT:
            return SizeArgument(formula_of(int(key.number)))
        if key.op is Op.SIZE:
            return SizeArgument(formula(cast(Dim, key.attr("size"))))
        return PointerArgument(next(b.key for b in self.buffers if b.node == operands[0]), writable=False)


def _call_of(step: tuple[Launch, ...] | LibraryProduct | LibraryStep | LoopStep) -> CallStep:
    if isinstance(step, tuple):
        return whole_launch(step).call if len(step) > 1 else step[0].call
    return step.call


def _is_added_by_one(body: Program, key: int) -> bool:
    """True if one product, or its parts, adds to a result of a loop, and nothing else touches it: the first block need not add, but
    writes."""
    touching = [step for step in body.steps if key in step.call.accesses]
    return all(isinstance(step, LibraryProduct) for step in touching) and len({step.group for step in touching}) == 1


def _adding_from(step: CallStep, start: Formula, added: Collection[int]) -> CallStep:
    return replace(step, adds=start) if isinstance(step, MatrixProduct) and step.out.buffer in added else step


def row_bytes(body: Program, blocks: Blocks) -> Formula:
    """The bytes of all values that the body of a loop keeps for itself, for each row of a block."""
    own = ((memory_shape(body.graph, b.node), b.dtype) for b in body.buffers if b.role is Role.TEMPORARY and b.node is not None)
    total = sympy.expand(sum((product(shape) * dtype.itemsize for shape, dtype in own), sympy.Integer(0)))
    return formula(simplify_dim(total.coeff(blocks.rows)))


def sum_bytes(blocks: Blocks) -> Formula:
    """The bytes of all that the blocks of a loop add to."""
    sums = (spec for spec, is_sum in zip(blocks.results, blocks.sums, strict=True) if is_sum)
    return formula(simplify_dim(sum((product(spec.shape) * spec.dtype.itemsize for spec in sums), sympy.Integer(0))))


_DIMS = ("dim", "dims", "part")
"""Attributes that are no sizes, beside words."""


def likeness(graph: Graph, group: Group) -> str:
    """A digest of what a group computes, whatever the sizes: operations, dtypes, dims, and which of these have one element."""
    return hashlib.sha256("\n".join(_lines(graph, group)).encode()).hexdigest()[:32]


def extents(launch: Launch, sizes: Mapping[str, int]) -> tuple[int, int]:
    """The numbers of rows and columns that a launch goes through; where nothing is reduced, the last dim counts as columns."""
    domain = launch.group.domain
    along = domain.columns or tuple(range(len(domain.shape)))[-1:]  # a tensor without dims is a row of one
    rows = product(extent for d, extent in enumerate(domain.shape) if d not in along)
    columns = product(domain.shape[d] for d in along)
    return formula(rows)(sizes), formula(columns)(sizes)


def _lines(graph: Graph, group: Group) -> Iterator[str]:
    inside = computed(graph, group)
    numbers = {position: number for number, position in enumerate(sorted({*group.inputs, *inside}))}
    yield f"{group.kind.name} {group.domain.rows} {group.domain.columns} {[numbers[p] for p in group.outputs]}"
    if graph.fast_math:
        yield "fast math"
    for position, number in numbers.items():
        node = graph.nodes[position]
        made = f"{node.op} {[numbers[a] for a in node.args]} {_words(node)}" if position in inside else "input"
        yield f"{number} {node.dtype} {''.join('1' if literal(e) == 1 else 'n' for e in node.shape)} {made}"


def _words(node: Node) -> list[tuple[str, object]]:
    return [(name, value) for name, value in node.attrs if name in _DIMS or isinstance(value, bool)]
