"""Groups to a program, and its kernels to text: padded rows, launches that overlap, launches joined as parts of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fusegen.emit.cuda import assemble_parts
from fusegen.errors import VerificationError
from fusegen.families import family_of
from fusegen.families.gemm.pipelines import is_heavy
from fusegen.families.library import LIBRARY_PRODUCT
from fusegen.fusion import Group
from fusegen.fusion.groups import READ, strip_views
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import may_pad, strided_view
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.program.call import TensorMapSpec
from fusegen.schedule.context import Bodies, Context, Pins, Plans
from fusegen.schedule.kernel import Plan, Pointer
from fusegen.schedule.memory import Memory
from fusegen.schedule.names import identifier
from fusegen.schedule.precision import approximations, contractions
from fusegen.schedule.program import Launch, Program, Step, is_of_one_block
from fusegen.source import Source
from fusegen.target import Backend, Target


def lower(
    graph: Graph,
    groups: tuple[Group, ...],
    target: Target,
    plans: Plans,
    *,
    wide: bool = False,
    pins: Pins | None = None,
    bodies: Bodies | None = None,
) -> Program:
    """The program of a graph.

    Args:
        graph: in primitives.
        groups: what fusion decided, in order.
        target: the machine.
        plans: of launches of products.
        wide: whether some tensor has 2^31 elements or more, so that indices need 64 bits.
        pins: plans that were asked for, of other launches.
        bodies: programs of loops.
    """
    graph = with_padded_rows(graph, groups, target)
    memory = Memory(graph, groups)
    fast, contracted = approximations(graph, groups, memory), contractions(graph, groups)
    steps: list[Step] = []
    for number, group in enumerate(groups):
        name = identifier(graph.name) if len(groups) == 1 else f"{identifier(graph.name)}_{number}"
        context = Context(
            graph, group, memory, target, wide, fast[group], contracted, name, plans, memory.reads, None, pins or {}, bodies or {}
        )
        found = family_of(group.kind).lower(context)
        _check_shared(found, target)
        steps += found
    return Program(graph, target, memory.specs, overlapping(in_parts(steps, target), target), tuple(memory.results))


def _check_shared(steps: Sequence[Step], target: Target) -> None:
    """Refuses what no launch could have.

    Raises:
        VerificationError: a plan takes more shared memory than a block can have.
    """
    for step in steps:
        if isinstance(step, Launch) and target.shared_bytes and step.shared_bytes > target.shared_bytes:
            what = f"{step.kernel.name} takes {step.shared_bytes} bytes of shared memory, {target.name} has {target.shared_bytes}"
            raise VerificationError(what, hint="please report the declaration and its shapes")


# Rows of matrices between kernels and the library, padded so that each starts at a multiple of 16 bytes. cuBLAS has fast kernels
# for 16-bit floats where rows lie like that, and takes several times as long where they do not. To pad memory of the call's own
# costs nothing: a kernel writes longer rows, and another skips the ends, which nobody writes.


def with_padded_rows(graph: Graph, groups: Sequence[Group], target: Target) -> Graph:
    """The graph which says of matrices that are operands or results of library products, and no result of the call, that their rows
    are padded in memory, where they would start at other places."""
    if target.device == "cpu":
        return graph
    padded = {value: nodes for value, nodes in _temporaries(graph, groups).items() if _may_be_padded(graph, groups, value, nodes)}
    while padded:
        found = replace(graph, padded=frozenset(p for nodes in padded.values() for p in nodes))
        lost = {strip_views(graph, base) for base in _no_views_now(graph, found, groups)}
        if not lost:
            return found
        padded = {value: nodes for value, nodes in padded.items() if value not in lost}
    return graph


def _temporaries(graph: Graph, groups: Sequence[Group]) -> dict[int, set[int]]:
    """Values that a group leaves for another, and for no one else, with the views of each as which they may lie in memory."""
    wanted = {strip_views(graph, position) for position in (*graph.outputs, *graph.puts)}
    found: dict[int, set[int]] = {}
    for group in groups:
        for position in group.inputs:
            value = strip_views(graph, position)
            if graph.nodes[position].op not in (*READ, Op.PUT) and value not in wanted:
                found.setdefault(value, {value}).add(position)
    return found


def _may_be_padded(graph: Graph, groups: Sequence[Group], value: int, nodes: set[int]) -> bool:
    """True if a heavy library product has a value as an operand or result, its rows are none of multiples of 16 bytes, and all that
    touch it can do with padded ones."""
    columns = {literal(graph.nodes[p].shape[-1]) if len(graph.nodes[p].shape) > 1 else None for p in nodes}
    extent = columns.pop()
    if columns or extent is None or not may_pad(extent):
        return False
    touching = [group for group in groups if value in group.outputs or not nodes.isdisjoint(group.inputs)]
    heavy = [group for group in touching if group.kind is LIBRARY_PRODUCT and is_heavy(graph, group.anchors[0])]
    return bool(heavy) and all(group.kind.is_strided for group in touching)


def _no_views_now(graph: Graph, padded: Graph, groups: Sequence[Group]) -> Iterator[int]:
    """Operands in memory of which, padded, no strides make what a library product reads."""
    products = (group.anchors[0] for group in groups if group.kind is LIBRARY_PRODUCT)
    for position in (p for matmul in products for p in graph.nodes[matmul].args):
        base = strided_view(graph, position).base
        if strided_view(padded, position).base != base:
            yield base


# Which launches begin while the one before them still runs, so that nobody waits for the device to start them. Such a launch
# starts as soon as all blocks of the one before have ended, when their last writes may still be under way. It waits for these at
# the very beginning of its text (``templates/cuda/primitives/wait_for_previous.cuh``), and that orders the two: - What it reads
# is there: the wait ends when the launch before has completed, and all its writes can be seen. - What it writes over has been
# read, for the same reason: the workspace may be used again. - It comes behind everything earlier, too: since each such launch
# waits before it does anything else, in every thread, one that has completed says the same of those before it. - The first launch
# of a call is an ordinary one: what other code has put into the stream before may be anything. So is one behind a product of the
# library, whose kernels are not known to wait. The one before says nowhere that the next may start earlier than at its end:
# blocks that wait would take the place of its last ones.


def overlapping(steps: Sequence[Step], target: Target) -> tuple[Step, ...]:
    """Steps in their order, of which launches directly behind another one overlap with its end, where the target has such."""
    if not target.overlap:
        return tuple(steps)
    return (*steps[:1], *(_behind(before, step) for before, step in pairwise(steps)))


def _behind(before: Step, step: Step) -> Step:
    starts = isinstance(step, Launch) and step.part <= 1
    return replace(step, overlaps=True) if starts and isinstance(step, Launch) and isinstance(before, Launch) else step


# Launches that do not depend on each other become parts of one: each has a range of its blocks.
#
# A function's results often have spaces of their own (q and k of a rotation, the three parts of a packed projection), which no
# single loop goes through. As parts of one launch they start together, and none of them waits for the last blocks of another.
# What takes one block, as a check of a norm's weights, goes before the first launch that it can start with.


_MOST = 8  # parts: each adds its code to the kernel
_LITTLE = 8 << 10  # bytes of shared memory, with which a multiprocessor is full of threads before


def in_parts(steps: Sequence[Step], target: Target) -> list[Step]:
    """The steps, of which launches directly behind each other that can start together are parts of one."""
    if not target.warp:
        return list(steps)
    return [part for run in _runs(_brought_forward(steps), _have_one_block) for part in _numbered(run)]


def _brought_forward(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which launches of one block come before an earlier one that they can start with."""
    found: list[Step] = []
    for step in steps:
        place = _earlier_place(found, step) if isinstance(step, Launch) and is_of_one_block(step) else None
        found.insert(len(found) if place is None else place, step)
    return found


def _earlier_place(steps: Sequence[Step], step: Launch) -> int | None:
    """The place before the last launch that a step can start with, where it needs none of those behind that."""
    for place in reversed(range(len(steps))):
        other = steps[place]
        if not isinstance(other, Launch) or not _are_independent(other, step):
            return None
        if _joins([other], step, lambda *_: True):
            return place
    return None


def with_equal_blocks(steps: Sequence[Step], target: Target) -> dict[tuple[int, ...], Plan]:
    """Plans with which launches have as many threads a block as the launches beside them, by the outputs of their groups.

    Rows say how many threads their blocks have; points, and what takes one block, go with any.
    """
    found: dict[tuple[int, ...], Plan] = {}
    if not target.warp:
        return found
    for run in _runs(steps, lambda *_: True):
        launches = [step for step in run if isinstance(step, Launch)]
        small = [launch for launch in launches if is_of_one_block(launch)]
        large = [launch for launch in launches if launch not in small] or launches
        fixed = [launch for launch in large if launch.plan is None or launch.plan.fixes_threads]
        is_crowded = any(launch.shared_bytes > _LITTLE for launch in large)
        for launch in small if is_crowded else launches:  # many blocks of points would wait for as much room as those of rows take
            plan = family_of(launch.group.kind).with_threads(launch, (fixed or large)[0].block)
            if plan is not None:
                found[launch.group.outputs] = plan
    return found


def _runs(steps: Sequence[Step], agree: Callable[[Launch, Launch], bool]) -> list[list[Step]]:
    """The steps, of which those that can start together are one run.

    Args:
        agree: says of two launches that could whether they do.
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
    """True if a launch can be one more part of some that start together."""
    before = [each for each in run if isinstance(each, Launch)]
    is_alike = len(before) == len(run) < _MOST and all(_is_simple(each) and agree(each, step) for each in (*before, step))
    return is_alike and all(_are_independent(each, step) and _agree(each, step) for each in before)


def _is_simple(launch: Launch) -> bool:
    """True if a launch needs nothing but its blocks."""
    return launch.kernel.body.can_be_part and not launch.tensor_maps and not launch.extra and launch.cluster == 1


def _are_independent(one: Launch, other: Launch) -> bool:
    """True if neither touches what the other writes; a call refuses tensors that overlap with one that is written to."""
    return not (_written(one) & _touched(other) or _touched(one) & _written(other))


def _written(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _places(launch) if each.writable)


def _touched(launch: Launch) -> frozenset[int]:
    return frozenset(each.buffer for each in _places(launch))


def _places(launch: Launch) -> list[Pointer | TensorMapSpec]:
    """All by which a launch reaches buffers."""
    return [*launch.kernel.pointers, *launch.tensor_maps]


def _agree(one: Launch, other: Launch) -> bool:
    """True if parameters of one name are the same ones."""
    names = {pointer.name: pointer for pointer in one.kernel.pointers}
    return all(names.get(pointer.name, pointer) == pointer for pointer in other.kernel.pointers)


# Text.


def emit(parts: Sequence[Launch], target: Target) -> Source:
    """The text of a kernel for a target: the same input gives the same text on any machine.

    Args:
        parts: of the kernel: one, or several that are launched together.
        target: the machine.
    """
    sources = [_emit(part, target) for part in parts]
    return sources[0] if len(parts) == 1 else assemble_parts(parts, sources, target)


def _emit(launch: Launch, target: Target) -> Source:
    family = family_of(launch.group.kind)
    emitters = family.cpu if target.backend is Backend.CPU else family.cuda
    return emitters[type(launch.kernel.body)](launch.kernel, launch, target)
