"""Groups to a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fusegen.errors import VerificationError
from fusegen.ir.formula import Formula, formula
from fusegen.ir.graph import Graph
from fusegen.passes.fuse import Group, GroupKind
from fusegen.schedule.lower.attention import lower_attention
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.contraction import lower_contraction
from fusegen.schedule.lower.library import lower_library
from fusegen.schedule.lower.memory import Memory
from fusegen.schedule.lower.pointwise import lower_pointwise
from fusegen.schedule.lower.precision import approximating
from fusegen.schedule.lower.rows import lower_rows
from fusegen.schedule.names import identifier
from fusegen.schedule.program import WORKSPACE, BufferSpec, Launch, Program, Role, Step
from fusegen.target import Backend, Target

Lowered: TypeAlias = tuple[Sequence[Step], Sequence[BufferSpec]]


def _pointwise(context: Context, first_workspace: int) -> Lowered:
    return [lower_pointwise(context)], []


_KINDS: dict[GroupKind, Callable[[Context, int], Lowered]] = {
    GroupKind.POINTWISE: _pointwise,
    GroupKind.ROW: lower_rows,
    GroupKind.COLUMN: lower_rows,
    GroupKind.ROW_COLUMN: lower_rows,
    GroupKind.CONTRACTION: lambda context, _: lower_contraction(context),
    GroupKind.ATTENTION: lambda context, _: lower_attention(context),
    GroupKind.LIBRARY: lambda context, _: lower_library(context),
}


def lower(graph: Graph, groups: tuple[Group, ...], target: Target, *, wide: bool = False) -> Program:
    """The program of a graph.

    Args:
        graph: in primitives.
        groups: what fusion decided, in order.
        target: the machine.
        wide: whether some tensor has 2^31 elements or more, so that indices need 64 bits.
    """
    memory = Memory(graph, groups)
    fast = approximating(graph, groups, memory)
    buffers = list(memory.buffers())
    steps: list[Step] = []
    workspace = 0
    for number, group in enumerate(groups):
        name = identifier(graph.name) if len(groups) == 1 else f"{identifier(graph.name)}_{number}"
        names = {spec.key: spec.name for spec in buffers}
        context = Context(graph, group, memory, target, wide, group in fast, name, names)
        new_steps, added = _KINDS[group.kind](context, WORKSPACE - workspace)
        _check_shared(new_steps, target)
        steps += new_steps
        buffers += added
        workspace += len(added)
    return Program(graph, target, tuple(buffers), tuple(steps), memory.result_views(), _workspace(graph, memory, buffers))


def _check_shared(steps: Sequence[Step], target: Target) -> None:
    """Refuses what no launch could have.

    Raises:
        VerificationError: a plan takes more shared memory than a block can have.
    """
    for step in steps:
        if isinstance(step, Launch) and target.backend is Backend.CUDA and step.shared_bytes > target.shared_bytes:
            what = f"{step.kernel.name} takes {step.shared_bytes} bytes of shared memory, {target.name} has {target.shared_bytes}"
            raise VerificationError(what, mend="please report the declaration and its shapes")


def _workspace(graph: Graph, memory: Memory, buffers: list[BufferSpec]) -> Formula:
    parts = [_bytes(spec) for spec in buffers if spec.role is Role.TEMPORARY]
    return Formula(" + ".join(parts)) if parts else formula(0)


def _bytes(spec: BufferSpec) -> str:
    return " * ".join([f"({f})" for f in spec.shape] + [str(spec.dtype.itemsize)])
