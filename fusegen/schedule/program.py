"""Programs: the steps of one call together with their graph; `Program.call` is the part that runs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias, cast

import sympy

from fusegen.fusion.groups import Domain, Group, computed, strip_views
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula, numbers_of
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import memory_shape
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.symbolic import Dim, literal, product, same, simplify_dim
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


@dataclass(frozen=True)
class BufferSpec(Buffer):
    """A buffer of a program; its node is the value that it holds, or None for internal buffers of one group."""

    node: int | None = None


@dataclass(frozen=True)
class Traffic:
    """The minimal bytes that a step reads and writes: each operand once."""

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
    last, then those of the parts. Of pointers with the same name, one is kept, a writable one if there is any."""
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


def started_together(steps: Sequence[Step]) -> list[tuple[Launch, ...] | LibraryMatmul | LibraryStep | LoopStep]:
    """The steps, with the parts of each launch in one tuple."""
    groups: list[tuple[Launch, ...] | LibraryMatmul | LibraryStep | LoopStep] = []
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


def _call_of(step: tuple[Launch, ...] | LibraryMatmul | LibraryStep | LoopStep) -> CallStep:
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


_DIMS = ("dim", "dims", "part")
"""Attributes of nodes that are not sizes; bools are not sizes either."""


@dataclass(frozen=True)
class Choice:
    """A choice between candidates that `fg.tune` can measure: plans of a launch, or programs.

    Attributes:
        name: the name of the kernel.
        digest: digest of the computation at any size.
        extents: the sizes of the computation.
        candidates: the candidates; the one that is taken without measurements comes first.
        outputs: the outputs of the launch; empty for a choice between programs.
    """

    name: str
    digest: str
    extents: tuple[int, ...]
    candidates: tuple[Plan, ...]
    outputs: tuple[int, ...] = ()


Measured: TypeAlias = Callable[[Choice], Plan | None]
"""Returns the measured or pinned candidate of a choice; None if there is none."""


def choice_of(name: str, graph: Graph, group: Group, sizes: Mapping[str, int], candidates: Sequence[Plan]) -> Choice:
    """Returns the choice between plans of a launch. The extents are rows and columns; for a matmul launch rows, columns of each
    part, and depth; for attention all dims of the result, and the depths of both matmuls."""
    values = tuple(formula(dim)(sizes) for dim in _choice_extents(graph, group))
    return Choice(name, group_digest(graph, group), values, tuple(candidates), group.outputs)


def group_digest(graph: Graph, group: Group) -> str:
    """Returns a digest of a group's computation at any size: operations, dtypes, dims, and which dims have one element. For a
    matmul launch it has the layouts and the class of the epilogue."""
    lines = _matmul_lines(graph, group) if group.parts else _digest_lines(graph, group)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def extents(launch: Launch, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the rows and columns that a launch iterates over; without reductions, the last dim counts as columns."""
    rows, columns = _domain_extents(launch.group.domain)
    return formula(rows)(sizes), formula(columns)(sizes)


def _domain_extents(domain: Domain) -> tuple[Dim, Dim]:
    columns_dims = domain.columns or tuple(range(len(domain.shape)))[-1:]  # a tensor without dims is a row of one
    rows = product(extent for d, extent in enumerate(domain.shape) if d not in columns_dims)
    return rows, product(domain.shape[d] for d in columns_dims)


def _choice_extents(graph: Graph, group: Group) -> tuple[Dim, ...]:
    matmuls = [graph.nodes[p] for p in group.core_nodes if graph.nodes[p].family is Family.CONTRACTION]
    depths = tuple(graph.nodes[node.args[0]].shape[-1] for node in matmuls)
    if group.parts:  # all matmuls have the same first operand
        columns = (graph.nodes[part.products[0]].shape[-1] for part in group.parts)
        return product(matmuls[0].shape[:-1]), *columns, depths[0]
    return (*group.domain.shape, *depths) if depths else _domain_extents(group.domain)


def _digest_lines(graph: Graph, group: Group) -> Iterator[str]:
    inside = computed(graph, group)
    numbers = {position: number for number, position in enumerate(sorted({*group.inputs, *inside}))}
    yield f"{group.kind.name} {group.domain.rows} {group.domain.columns} {[numbers[p] for p in group.outputs]}"
    if graph.fast_math:
        yield "fast math"
    for position, number in numbers.items():
        node = graph.nodes[position]
        description = f"{node.op} {[numbers[a] for a in node.args]} {_attributes(node)}" if position in inside else "input"
        yield f"{number} {node.dtype} {''.join('1' if literal(e) == 1 else 'n' for e in node.shape)} {description}"


def _matmul_lines(graph: Graph, group: Group) -> Iterator[str]:
    """Yields the layouts of a matmul launch and the class of its epilogue: matrices that it reads and writes, and whether it has
    reductions and special functions."""
    yield f"{group.kind.name} {group.pipeline} {len(group.core_nodes)}"
    elements = [product(part.domain.shape) for part in group.parts]
    operands = {strip_views(graph, a) for part in group.parts for matmul in part.products for a in graph.nodes[matmul].args}
    for part, count in zip(group.parts, elements, strict=True):
        layouts = [(group.match[matmul].a_major, group.match[matmul].b_major) for matmul in part.products]
        yield f"{graph.nodes[part.products[0]].dtype} {layouts} {part.head} {part.shift}"
        for output, order in zip(part.outputs, part.orders, strict=True):
            node, is_permuted = graph.nodes[output], order != tuple(sorted(order))
            yield f"{node.dtype} {same(product(node.shape), count)} {output in group.core_nodes} {order if is_permuted else ''}"
    others = [graph.nodes[p] for p in group.inputs if strip_views(graph, p) not in operands]
    yield f"{sorted(f'{n.op} {n.dtype}' for n in others if any(same(product(n.shape), count) for count in elements))}"
    ops = {graph.nodes[p].op for p in computed(graph, group)}
    yield f"{any(op.family is Family.REDUCTION for op in ops)} {any(map(_is_special, ops))}"


def _is_special(op: Op) -> bool:
    """True for functions such as exponentials."""
    return op.family is Family.POINTWISE and op.row.result is DtypeRule.FLOAT


def _attributes(node: Node) -> list[tuple[str, object]]:
    return [(name, value) for name, value in node.attrs if name in _DIMS or isinstance(value, bool)]
