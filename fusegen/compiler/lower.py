"""Lowers groups to a program, and emits its kernels: padded rows, overlapping launches, horizontal fusion."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fusegen.emit.cuda import assemble_parts
from fusegen.errors import VerificationError
from fusegen.families import family_of
from fusegen.families.gemm.deep import DeepFusion
from fusegen.families.gemm.pipelines import is_heavy
from fusegen.families.library import LIBRARY_MATMUL
from fusegen.fusion import Group
from fusegen.fusion.groups import READ, matmuls_of, strip_views
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import may_pad, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.program.call import LaunchPlan, TensorMapSpec
from fusegen.schedule.context import Bodies, Context, Pins, Plans
from fusegen.schedule.kernel import Plan, Pointer
from fusegen.schedule.memory import Memory
from fusegen.schedule.names import identifier
from fusegen.schedule.precision import approximations, contractions
from fusegen.schedule.program import Launch, LibraryMatmul, Program, Run, Step, has_one_block, started_together
from fusegen.source import Source
from fusegen.target import Backend, Target
from fusegen.threads import cached_property

KernelNames: TypeAlias = tuple[tuple[object, str], ...]
"""Keys of groups and names of their kernels, in a default program: without measurements and declared plans."""


@dataclass(frozen=True)
class Specialization:
    """A graph, fused and planned for some sizes.

    Attributes:
        graph: in primitives; marks the matmuls that the library computes by choice.
        groups: the groups that fusion made.
        program: the steps of a call.
    """

    graph: Graph
    groups: tuple[Group, ...]
    program: Program

    @cached_property
    def bound(self) -> dict[object, Any]:
        """Cache of calls bound to exact sizes, by everything that a bound call depends on (`compiler.backends`)."""
        return {}

    @property
    def call(self) -> LaunchPlan:
        """The launch plan of a call."""
        return self.program.call

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch. Emitting it takes longer than all stages before."""
        return tuple(emit(parts, self.program.target) for parts in self.program.kernels)


def lower(
    graph: Graph,
    groups: tuple[Group, ...],
    target: Target,
    plans: Plans,
    deep: Collection[DeepFusion] = (),
    *,
    names: Sequence[str] = (),
    index64: bool = False,
    pins: Pins | None = None,
    bodies: Bodies | None = None,
) -> Program:
    """The program of a graph.

    Args:
        graph: the graph, in primitives.
        groups: the groups of fusion, in order.
        plans: the plans of matmul launches.
        deep: pairs of groups that become one launch; their plans take precedence.
        names: the names of the groups' kernels; by default they are numbered.
        index64: whether some tensor has 2^31 elements or more, so that indices need 64 bits.
        pins: requested plans of other launches.
        bodies: programs of loop bodies.
    """
    plans = {**plans, **{group.core_nodes: plan for each in deep for group, plan in each.plans}}
    graph = with_padded_rows(graph, groups, target)
    memory = Memory(graph, groups)
    fast, contracted = approximations(graph, groups, memory), contractions(graph, groups)
    steps: list[Step] = []
    for group, name in zip(groups, names or kernel_names(graph, groups), strict=True):
        context = Context(
            graph,
            group,
            memory,
            target,
            index64,
            fast[group],
            contracted,
            name,
            plans,
            memory.reads,
            None,
            pins or {},
            bodies or {},
        )
        group_steps = family_of(group.kind).lower(context)
        _check_shared(group_steps, target)
        steps += group_steps
    fused = fuse_deep(fuse_horizontally(steps, target), deep)
    return Program(graph, target, memory.specs, mark_overlaps(fused, target), tuple(memory.results))


def kernel_names(graph: Graph, groups: Sequence[Group], default: KernelNames = ()) -> tuple[str, ...]:
    """Returns the names of groups' kernels: numbered, or those of the default program for the same matmuls and values, where other
    groups get the numbers after these."""
    name, known = identifier(graph.name), dict(default)
    if not known:
        return (name,) if len(groups) == 1 else tuple(f"{name}_{number}" for number in range(len(groups)))
    names, numbers = list[str](), itertools.count(len(set(known.values())))
    for group in groups:
        found = (known[key] for key in _identities(graph, group) if key in known and known[key] not in names)
        names.append(next(found, None) or f"{name}_{next(numbers)}")
    return tuple(names)


def names_of(default: Specialization) -> KernelNames:
    """Returns the names of a default program."""
    named = zip(default.groups, kernel_names(default.graph, default.groups), strict=True)
    return tuple((key, name) for group, name in named for key in _identities(default.graph, group))


def _identities(graph: Graph, group: Group) -> list[object]:
    """Returns keys that groups for the same matmuls or values share: numbers of matmuls, or outputs."""
    numbers = {matmul: number for number, matmul in enumerate(matmuls_of(graph))}
    return [numbers[p] for p in group.core_nodes if p in numbers] or [group.outputs]


def _check_shared(steps: Sequence[Step], target: Target) -> None:
    """Refuses launches that need more shared memory than a block can have.

    Raises:
        VerificationError: a launch needs more.
    """
    for step in steps:
        if isinstance(step, Launch) and target.shared_bytes and step.shared_bytes > target.shared_bytes:
            what = f"{step.kernel.name} needs {step.shared_bytes} bytes of shared memory; {target.name} has {target.shared_bytes}"
            raise VerificationError(what, hint="please report the declaration and its shapes")


# Padded rows. cuBLAS has fast kernels for 16-bit floats if each row starts at a multiple of 16 bytes, and takes several times as
# long otherwise. Padding a temporary costs nothing: one kernel writes longer rows, and the next one skips their ends.


def with_padded_rows(graph: Graph, groups: Sequence[Group], target: Target) -> Graph:
    """Marks matrices whose rows are padded in memory: temporaries that a library matmul reads or writes, with rows that would
    not start at multiples of 16 bytes."""
    if target.device == "cpu":
        return graph
    padded = {value: nodes for value, nodes in _temporaries(graph, groups).items() if _may_be_padded(graph, groups, value, nodes)}
    while padded:
        padded_graph = replace(graph, padded=frozenset(p for nodes in padded.values() for p in nodes))
        lost = {strip_views(graph, base) for base in _lost_views(graph, padded_graph, groups)}
        if not lost:
            return padded_graph
        padded = {value: nodes for value, nodes in padded.items() if value not in lost}
    return graph


def _temporaries(graph: Graph, groups: Sequence[Group]) -> dict[int, set[int]]:
    """Maps each value that is stored only for other groups to the views through which they read it."""
    results = {strip_views(graph, position) for position in (*graph.outputs, *graph.puts)}
    temporaries: dict[int, set[int]] = {}
    for group in groups:
        for position in group.inputs:
            value = strip_views(graph, position)
            if graph.nodes[position].op not in (*READ, Op.PUT) and value not in results:
                temporaries.setdefault(value, {value}).add(position)
    return temporaries


def _may_be_padded(graph: Graph, groups: Sequence[Group], value: int, nodes: set[int]) -> bool:
    """True if a heavy library matmul reads or writes a value, its rows are not multiples of 16 bytes, and all groups that touch
    it can handle padded rows."""
    columns = {literal(graph.nodes[p].shape[-1]) if len(graph.nodes[p].shape) > 1 else None for p in nodes}
    extent = columns.pop()
    if columns or extent is None or not may_pad(extent):
        return False
    touching = [group for group in groups if value in group.outputs or not nodes.isdisjoint(group.inputs)]
    heavy = [group for group in touching if group.kind is LIBRARY_MATMUL and is_heavy(graph, group.core_nodes[0])]
    return bool(heavy) and all(group.kind.is_strided for group in touching)


def _lost_views(graph: Graph, padded: Graph, groups: Sequence[Group]) -> Iterator[int]:
    """Operands of library matmuls whose views have no strides once their matrix is padded."""
    products = (group.core_nodes[0] for group in groups if group.kind is LIBRARY_MATMUL)
    for position in (p for matmul in products for p in graph.nodes[matmul].args):
        base = strided_view(graph, position).base
        if strided_view(padded, position).base != base:
            yield base


# Programmatic dependent launch: a launch overlaps with the end of the previous one, so that the next kernel's start costs no time.
#
# It starts as soon as each block of the previous launch has ended or triggered (``launch_dependents``), and then waits for that
# launch (``wait_for_previous``). This orders the launches:
# - Its inputs are complete: the wait ends when the previous launch has completed and its writes are visible. The trigger does not
#   change this.
# - It may overwrite what the previous launch has read, for the same reason: the workspace can be reused.
# - It runs after all earlier launches too: a thread triggers or ends only after its own wait, so all but the previous launch have
#   completed when a launch starts.
# - Before it waits, it may read what any launch but the previous one has written, for this reason. It writes nothing.
# - Its blocks take no place from the previous launch, whose blocks have all started by then.
# A library matmul counts as a launch that triggers at its end. Its last kernel ends after all earlier work, which may have written
# its operands. It may trigger before it waits, though: the next launch reads nothing before its own wait.
# The first launch of a call does not overlap: the earlier work in the stream is unknown. Kernels trigger behind their main loop:
# blocks that wait longer occupy SMs, which costs up to 4 µs.


def mark_overlaps(steps: Sequence[Step], target: Target) -> tuple[Step, ...]:
    """The steps, with launches marked that overlap with the end of the launch directly before them, or trigger the next one."""
    if not target.overlap:
        return tuple(steps)
    runs = started_together(steps)
    marked: list[Step] = []
    for before, run, after in zip((None, *runs), runs, (*runs[1:], None), strict=False):
        if isinstance(run, tuple):
            marked += _linked(before, run, triggers=isinstance(after, tuple))
        else:
            marked.append(run)
    return tuple(marked)


def _linked(before: Run | None, parts: Sequence[Launch], *, triggers: bool) -> Sequence[Launch]:
    written = frozenset().union(*map(_written, before)) if isinstance(before, tuple) else frozenset[int]()
    if parts[-1].waits:  # the second part reads its weights early too; the first part lets nothing start before that
        first, second = parts
        (linked,) = _linked(before, (first,), triggers=False)
        early = _touched(second) - written - _written(first) if linked.early_reads or not linked.overlaps else frozenset[int]()
        return (linked, replace(second, overlaps=linked.overlaps, early_reads=early, triggers=triggers))
    first, *others = (replace(part, triggers=triggers) for part in parts)
    if isinstance(before, tuple):
        first = replace(first, overlaps=True, early_reads=_touched(first) - written)
    elif isinstance(before, LibraryMatmul):
        first = replace(first, overlaps=True)
    return (first, *others)


# Horizontal fusion: independent launches become parts of one launch. Each part runs in a range of its thread blocks.
#
# A function's results often have iteration spaces of their own (q and k of a rotation, the three parts of a packed projection). As
# parts of one launch they start at the same time, and none waits for the last blocks of another. A launch of one block, such as a
# check of a norm's weights, moves in front of the first launch that it can join.


_MOST_PARTS = 8  # each adds its code to the kernel
_LITTLE = 8 << 10  # bytes of shared memory per block up to which it does not limit the blocks of an SM


def fuse_horizontally(steps: Sequence[Step], target: Target) -> list[Step]:
    """Horizontal fusion: the steps, with neighbouring independent launches as parts of one launch."""
    if not target.warp:
        return list(steps)
    return [part for run in _runs(_brought_forward(steps), _have_one_block) for part in _numbered(run)]


def _brought_forward(steps: Sequence[Step]) -> list[Step]:
    """The steps, with launches of one block moved in front of an earlier launch that they can join."""
    reordered: list[Step] = []
    for step in steps:
        position = _position_to_join(reordered, step) if isinstance(step, Launch) and has_one_block(step) else None
        reordered.insert(len(reordered) if position is None else position, step)
    return reordered


def _position_to_join(steps: Sequence[Step], step: Launch) -> int | None:
    """The position of the last launch that a step can join, if it is independent of all steps after it."""
    for position in reversed(range(len(steps))):
        other = steps[position]
        if not isinstance(other, Launch) or not _are_independent(other, step):
            return None
        if _joins([other], step, lambda *_: True):
            return position
    return None


def with_equal_blocks(steps: Sequence[Step], target: Target) -> dict[tuple[int, ...], Plan]:
    """Plans, by the outputs of their groups, that give launches as many threads per block as their neighbours, so that they can be
    parts of one launch. Row plans fix their threads; pointwise plans and plans of one block adapt."""
    plans: dict[tuple[int, ...], Plan] = {}
    if not target.warp:
        return plans
    for run in _runs(steps, lambda *_: True):
        launches = [step for step in run if isinstance(step, Launch)]
        small = [launch for launch in launches if has_one_block(launch)]
        large = [launch for launch in launches if launch not in small] or launches
        fixed = [launch for launch in large if launch.plan is None or launch.plan.fixes_threads]
        is_crowded = any(launch.shared_bytes > _LITTLE for launch in large)
        for launch in small if is_crowded else launches:  # pointwise blocks would need as much shared memory as row blocks
            plan = family_of(launch.group.kind).with_threads(launch, (fixed or large)[0].block)
            if plan is not None:
                plans[launch.group.outputs] = plan
    return plans


def _runs(steps: Sequence[Step], agree: Callable[[Launch, Launch], bool]) -> list[list[Step]]:
    """The steps, grouped into runs of launches that can start together.

    Args:
        agree: tells if two launches may be in one run.
    """
    runs: list[list[Step]] = []
    for step in steps:
        if runs and isinstance(step, Launch) and _joins(runs[-1], step, agree):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _have_one_block(one: Launch, other: Launch) -> bool:
    return one.block == other.block


def _numbered(run: Sequence[Step]) -> list[Step]:
    if len(run) == 1:
        return list(run)
    return [replace(step, part=number) for number, step in enumerate(run, 1) if isinstance(step, Launch)]


def _joins(run: Sequence[Step], step: Launch, agree: Callable[[Launch, Launch], bool]) -> bool:
    """True if a launch can join a run, as one more part of its fused launch."""
    before = [each for each in run if isinstance(each, Launch)]
    is_alike = len(before) == len(run) < _MOST_PARTS and all(_is_simple(each) and agree(each, step) for each in (*before, step))
    return is_alike and all(_are_independent(each, step) and _agree(each, step) for each in before)


def _is_simple(launch: Launch) -> bool:
    """True if a launch has no tensor maps, clusters or extra work."""
    return launch.kernel.body.can_be_part and not launch.tensor_maps and not launch.extra and launch.cluster == 1


def _are_independent(one: Launch, other: Launch) -> bool:
    """True if neither launch touches a buffer that the other writes. A call refuses arguments that overlap with one it writes
    to."""
    return not (_written(one) & _touched(other) or _touched(one) & _written(other))


def _written(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _accesses(launch) if each.writable)


def _touched(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _accesses(launch))


def _accesses(launch: Launch) -> list[Pointer | TensorMapSpec]:
    """All pointers and tensor maps through which a launch reaches buffers."""
    return [*launch.kernel.pointers, *launch.tensor_maps]


def _agree(one: Launch, other: Launch) -> bool:
    """True if pointers with the same name are equal in both launches."""
    names = {pointer.name: pointer for pointer in one.kernel.pointers}
    return all(names.get(pointer.name, pointer) == pointer for pointer in other.kernel.pointers)


# Deep fusion: a launch and the next one, which multiplies its result, become parts of one launch. Blocks of the second part request
# their weights while blocks of the first part still run, then wait for all of these.


def fuse_deep(steps: Sequence[Step], deep: Collection[DeepFusion]) -> list[Step]:
    """Deep fusion: the steps, with pairs of launches as parts of one launch."""
    parts = {group.outputs: part for each in deep for part, group in enumerate((each.first, each.second), 1)}
    numbers = [parts.get(step.group.outputs, 0) if isinstance(step, Launch) else 0 for step in steps]
    return [
        replace(step, part=number, waits=number == 2) if isinstance(step, Launch) and number else step
        for step, number in zip(steps, numbers, strict=True)
    ]


# Text.


def emit(parts: Sequence[Launch], target: Target) -> Source:
    """Emits a kernel. The text depends only on the arguments, not on the machine.

    Args:
        parts: one launch, or several that are launched together.
    """
    sources = [_emit(part, target) for part in parts]
    return sources[0] if len(parts) == 1 else assemble_parts(parts, sources, target)


def _emit(launch: Launch, target: Target) -> Source:
    family = family_of(launch.group.kind)
    emitters = family.cpu if target.backend is Backend.CPU else family.cuda
    return emitters[type(launch.kernel.body)](launch.kernel, launch, target)
