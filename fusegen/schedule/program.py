"""Programs: the steps of one call together with their graph; `Program.call` is the part that runs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias, TypeVar, cast

import sympy

from fusegen.fusion.groups import Group
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula, numbers_of
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import memory_shape
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, simplify_dim
from fusegen.program.call import (
    Buffer,
    CallStep,
    CounterArgument,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    LibraryResult,
    Loop,
    MapArgument,
    MatmulCall,
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
from fusegen.schedule.kernel import LoweredKernel, Plan, Pointer
from fusegen.schedule.names import scalar_identifier
from fusegen.target import Target
from fusegen.threads import cached_property

T = TypeVar("T")


@dataclass(frozen=True)
class BufferSpec(Buffer):
    """A buffer of a program; its node is the value that it holds, or None for internal buffers of one group."""

    node: int | None = None


@dataclass(frozen=True)
class Traffic:
    """The minimal bytes that a step reads and writes, each element once. Parts of one launch count what each of them reads."""

    read: Formula
    written: Formula

    def moved(self, sizes: Mapping[str, int]) -> int:
        return self.read(sizes) + self.written(sizes)


@dataclass(frozen=True, repr=False)
class Launch:
    """One kernel launch.

    Attributes:
        block: threads per block.
        shared_bytes: dynamic shared memory per block.
        mapped: the tensors of `tensor_maps`.
        extra: size arguments before the kernel's own.
        candidates: the possible plans, the one with the lowest estimated time first; empty if there is only one, and for matmuls
            whose plan is chosen before they are lowered.
        overlaps: True if it starts while the previous launch still runs (programmatic dependent launch), and waits for it itself.
        triggers: True if it lets the next launch start once no block has inputs left to load.
        early_reads: the buffers that it may read before it waits for the previous launch, which does not write them.
        part: the number of a part, from 1, in a fused launch; 0 for a separate launch.
        waits: True if its blocks wait for those of the parts before it, whose results they read (deep fusion).
    """

    kernel: LoweredKernel
    group: Group
    tensor_maps: tuple[TensorMapSpec, ...]
    grid: Formula
    block: int
    shared_bytes: int
    traffic: Traffic
    mapped: tuple[Pointer, ...] = ()
    extra: tuple[Formula, ...] = ()
    candidates: tuple[Plan, ...] = ()
    overlaps: bool = False
    triggers: bool = False
    early_reads: frozenset[int] = frozenset()
    part: int = 0
    waits: bool = False

    def __repr__(self) -> str:
        return f"<launch of {self.kernel.name}: {self.group.kind.name}, grid {self.grid}, block {self.block}>"

    @property
    def description(self) -> str:
        return self.kernel.body.describe(self.group.kind.name)

    @property
    def plan(self) -> Plan | None:
        return self.kernel.body.chosen_plan

    @property
    def cluster(self) -> int:
        return self.kernel.body.cluster

    @property
    def call(self) -> KernelLaunch:
        """The instruction that runs it; the arguments are tensor maps, extra sizes, buffers, sizes, scalars, a counter."""
        arguments: tuple[LaunchArgument, ...] = (
            *map(MapArgument, range(len(self.tensor_maps))),
            *map(SizeArgument, self.extra),
            *(PointerArgument(p.buffer, p.writable) for p in self.kernel.pointers),
            *(SizeArgument(size(name)) for name in self.kernel.sizes),
            *(ScalarArgument(name, dtype.is_float) for name, dtype in self.kernel.scalars),
            *([CounterArgument()] if self.waits else []),
        )
        layout = (self.tensor_maps, self.grid, self.block, self.shared_bytes)
        return KernelLaunch(*layout, arguments, self.kernel.checks, self.cluster, self.overlaps)


def has_one_block(launch: Launch) -> bool:
    """True if a launch has one block at all sizes."""
    return launch.grid == formula_of(1)


def fused_launch(parts: Sequence[Launch]) -> Launch:
    """Fuses launches: each part gets a range of blocks. The extra size arguments are the numbers of blocks of all parts but the
    last, then those of the parts. One of several pointers with the same name is kept, a writable one if there is any."""
    first = parts[0]
    kernels = [part.kernel for part in parts]
    kernel = LoweredKernel(
        f"{first.kernel.name}_to_{parts[-1].kernel.name.rpartition('_')[2]}",
        _shared_pointers(kernels),
        tuple(dict.fromkeys(name for kernel in kernels for name in kernel.sizes)),
        tuple(dict.fromkeys(scalar for kernel in kernels for scalar in kernel.scalars)),
        first.kernel.body,
        any(kernel.index64 for kernel in kernels),
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
        extra=(*grids[:-1], *(size for part in parts for size in part.extra)),
        overlaps=first.overlaps,
        waits=parts[-1].waits,
    )


def _shared_pointers(kernels: Sequence[LoweredKernel]) -> tuple[Pointer, ...]:
    pointers: dict[str, Pointer] = {}
    for pointer in (pointer for kernel in kernels for pointer in kernel.pointers):
        if pointer.name not in pointers or pointer.writable:
            pointers[pointer.name] = pointer
    return tuple(pointers.values())


@dataclass(frozen=True, repr=False)
class LibraryMatmul:
    """A matmul by torch (cuBLAS on a GPU): out = a @ b, or out += a @ b.

    Attributes:
        reason: the reason why no generated kernel computes it.
        padded: row pitches, in elements, of operands and results with padded rows.
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
    def call(self) -> MatmulCall:
        return MatmulCall(self.a, self.b, self.out, formula_of(int(self.adds)))


@dataclass(frozen=True, repr=False)
class LibraryStep:
    """A function of torch, which allocates its results.

    Attributes:
        settings, sizes, operands: arguments that are literals, sizes, tensors.
        results, shapes: the results that are used, and their shapes in memory.
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
        return LibraryCall(self.function, self.settings, self.sizes, self.operands, self.results)


@dataclass(frozen=True, repr=False)
class LoopStep:
    """A loop over blocks of rows.

    Attributes:
        row_bytes: the bytes of temporaries per row, unless a nested loop reduces them.
        operands: the buffers of the body's inputs, in order: operands, then results.
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
        results = self.operands[len(self.blocks.operands) :]
        sums = tuple(result for result, is_sum in zip(results, self.blocks.sums, strict=True) if is_sum)
        extent = formula(self.blocks.extent)
        start, rows = self.blocks.start.name, self.blocks.rows.name
        inputs = dict(zip(self.operands, (key for key, _ in self.body.inputs), strict=True))
        added = {inputs[result]: result for result in sums if _is_added_by_one_matmul(self.body, inputs[result])}
        body = replace(self.body.call, steps=tuple(_adding_from(step, size(start), added) for step in self.body.call.steps))
        zeros = tuple(result for result in sums if result not in added.values())
        return Loop(body, start, rows, extent, self.operands, zeros, results, self.row_bytes, sum_bytes(self.blocks))


Step: TypeAlias = "Launch | LibraryMatmul | LibraryStep | LoopStep"


Run: TypeAlias = tuple[Launch, ...] | LibraryMatmul | LibraryStep | LoopStep
"""The parts of one launch, or another step."""


def started_together(steps: Sequence[Step]) -> list[Run]:
    """The steps, with the parts of each launch in one tuple."""
    groups: list[Run] = []
    for step in steps:
        previous = groups[-1] if groups else None
        if not isinstance(step, Launch):
            groups.append(step)
        elif step.part > 1 and isinstance(previous, tuple):
            groups[-1] = (*previous, step)
        else:
            groups.append((step,))
    return groups


@dataclass(frozen=True, repr=False)
class Program:
    """The steps of one call; the graph, in primitives, defines the nodes that they refer to."""

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
        named = {position: str(node.attr("name")) for position, node in self.graph if node.op is Op.INPUT}
        return tuple((spec.key, named[spec.node]) for spec in self.buffers if spec.node in named and spec.role is Role.INPUT)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel launches outside of loops."""
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> tuple[tuple[Launch, ...], ...]:
        """The parts of each launched kernel in order, including loops; most kernels have one part."""
        kernels: list[tuple[Launch, ...]] = []
        for step in started_together(self.steps):
            if isinstance(step, LoopStep):
                kernels += step.body.kernels
            elif isinstance(step, tuple):
                kernels.append(step)
        return tuple(kernels)

    @property
    def numbered(self) -> tuple[tuple[str, Step], ...]:
        """The steps with their numbers: ``2.``, or ``2.1`` for the first part of a launch."""
        numbered = []
        for number, step in enumerate(started_together(self.steps), 1):
            parts = step if isinstance(step, tuple) else (step,)
            numbered += [(f"{number}." if len(parts) == 1 else f"{number}.{index}", part) for index, part in enumerate(parts, 1)]
        return tuple(numbered)

    @cached_property
    def call(self) -> LaunchPlan:
        """The instructions that run it, without the graph."""
        derived = numbers_of(self.graph.derived)
        return LaunchPlan(
            buffers=tuple(Buffer(b.key, b.name, b.dtype, b.shape, b.role) for b in self.buffers),
            inputs=self.inputs,
            steps=tuple(_call_of(step) for step in started_together(self.steps)),
            results=self.results,
            scalars=Numbers(derived.lines, tuple((scalar_identifier(name), index) for name, index in derived.results)),
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


def _call_of(step: Run) -> CallStep:
    if isinstance(step, tuple):
        return fused_launch(step).call if len(step) > 1 else step[0].call
    return step.call


def _is_added_by_one_matmul(body: Program, key: int) -> bool:
    """True if only the parts of one matmul add to a loop's result: the first block then writes instead of adding."""
    users = [step for step in body.steps if key in step.call.accesses]
    return all(isinstance(step, LibraryMatmul) for step in users) and len({step.group for step in users}) == 1


def _adding_from(step: CallStep, start: Formula, added: Collection[int]) -> CallStep:
    return replace(step, adds=start) if isinstance(step, MatmulCall) and step.out.buffer in added else step


def row_bytes(body: Program, blocks: Blocks) -> Formula:
    """Returns the bytes of the loop body's temporaries per row of a block."""
    temporaries = (
        (memory_shape(body.graph, b.node), b.dtype) for b in body.buffers if b.role is Role.TEMPORARY and b.node is not None
    )
    total = sympy.expand(sum((product(shape) * dtype.itemsize for shape, dtype in temporaries), sympy.Integer(0)))
    return formula(simplify_dim(total.coeff(blocks.rows)))


def sum_bytes(blocks: Blocks) -> Formula:
    """Returns the bytes of all results that a loop's blocks add to."""
    sums = (spec for spec, is_sum in zip(blocks.results, blocks.sums, strict=True) if is_sum)
    return formula(simplify_dim(sum((product(spec.shape) * spec.dtype.itemsize for spec in sums), sympy.Integer(0))))
