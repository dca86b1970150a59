"""Groups to a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusegen.errors import VerificationError
from fusegen.ir.graph import Graph
from fusegen.passes.fuse import Group, GroupKind
from fusegen.schedule.lower.attention import lower_attention
from fusegen.schedule.lower.context import Bodies, Context, Pins, Plans
from fusegen.schedule.lower.contraction import lower_contraction
from fusegen.schedule.lower.library import lower_blocks, lower_call, lower_library
from fusegen.schedule.lower.memory import Memory
from fusegen.schedule.lower.overlap import overlapping
from fusegen.schedule.lower.padding import with_padded_rows
from fusegen.schedule.lower.parts import in_parts
from fusegen.schedule.lower.pointwise import lower_pointwise
from fusegen.schedule.lower.precision import approximations, contractions
from fusegen.schedule.lower.rows import lower_rows
from fusegen.schedule.lower.scans import lower_scans
from fusegen.schedule.names import identifier
from fusegen.schedule.program import Launch, Program, Step
from fusegen.target import Backend, Target

_KINDS: dict[GroupKind, Callable[[Context], Sequence[Step]]] = {
    GroupKind.POINTWISE: lambda context: [lower_pointwise(context)],
    GroupKind.ROW: lower_rows,
    GroupKind.COLUMN: lower_rows,
    GroupKind.ROW_COLUMN: lower_rows,
    GroupKind.SCAN: lower_scans,
    GroupKind.CONTRACTION: lower_contraction,
    GroupKind.ATTENTION: lower_attention,
    GroupKind.LIBRARY: lower_library,
    GroupKind.CALL: lower_call,
    GroupKind.LOOP: lower_blocks,
}


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
        found = _KINDS[group.kind](context)
        _check_shared(found, target)
        steps += found
    return Program(graph, target, memory.specs, overlapping(in_parts(steps, target), target), tuple(memory.results))


def _check_shared(steps: Sequence[Step], target: Target) -> None:
    """Refuses what no launch could have.

    Raises:
        VerificationError: a plan takes more shared memory than a block can have.
    """
    for step in steps:
        if isinstance(step, Launch) and target.backend is Backend.CUDA and step.shared_bytes > target.shared_bytes:
            what = f"{step.kernel.name} takes {step.shared_bytes} bytes of shared memory, {target.name} has {target.shared_bytes}"
            raise VerificationError(what, mend="please report the declaration and its shapes")
