"""Every stage of a lowered kernel as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum

from fusegen.errors import ArgumentError
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.lowered import Lowered
from fusegen.passes.fuse import Group
from fusegen.schedule.program import Launch, LibraryProduct, LibraryStep, LoopStep, Step
from fusegen.units import human_bytes

LANGUAGES = {"cuda": "cuda", "cpp": "cpp", "ptx": "ptx", "sass": "sass"}
"""Stages that are code, with the name that highlighting knows each by."""

STAGES = ("trace", "graph", "groups", "plan", *LANGUAGES)
"""All stages, in order."""


def available(low: Lowered) -> tuple[str, ...]:
    """The stages that the target has, in order."""
    return tuple(stage for stage in STAGES if stage not in LANGUAGES or stage in tuple(low.asm))


def stage_text(low: Lowered, stage: str) -> str:
    """The text of a stage.

    Raises:
        ArgumentError: the target has no such stage.
        ToolNotFoundError: it takes a compiler or a disassembler that is not on this machine.
    """
    if stage not in available(low):
        raise ArgumentError(f"{low.target.name} has no stage {stage!r}", mend=f"--stage {' | '.join(available(low))}")
    if stage in LANGUAGES:
        return low.asm[stage] if low.sources else f"// {low.graph.name}: nothing but library calls"
    return _RULES[stage](low)


def own_text(low: Lowered) -> str:
    """The source without the primitives, each kernel's math and pipeline, and a line that says how to see the whole."""
    language = low.sources[0].language
    own = "\n".join(f"{source.banner}\n{source.kernel_text}" for source in low.sources)
    names = dict.fromkeys(primitive.name for source in low.sources for primitive in source.primitives)
    return f"{own}\n// {len(names)} primitives are left out: --stage {language} prints them too, as text that compiles by itself."


def _groups(low: Lowered) -> str:
    return "\n".join(f"{number}. {_group(low.graph, group)}" for number, group in enumerate(low.groups, 1))


def _group(graph: Graph, group: Group) -> str:
    shape = ", ".join(f"{extent}{'*' if d in group.domain.columns else ''}" for d, extent in enumerate(group.domain.shape))
    lines = [f"{group.kind.value} over [{shape}]"]
    lines += [f"   reads {_names(graph, group.inputs)}, writes {_names(graph, group.outputs)}"]
    lines += [f"   computes on the way {_names(graph, group.anchors)}"] if group.anchors else []
    return "\n".join(lines + ([f"   {group.reason}"] if group.reason else []))


def _names(graph: Graph, positions: tuple[int, ...]) -> str:
    return ", ".join(_name(graph, position) for position in positions) or "nothing"


def _name(graph: Graph, position: int) -> str:
    """A node as the stage ``graph`` calls it."""
    node = graph.nodes[position]
    if node.op in (Op.INPUT, Op.SCALAR):
        return str(node.attr("name"))
    return f"%{position} {node.op.row.name}"


def _plan(low: Lowered) -> str:
    return "\n".join(f"{number} {_step(step, low.sizes)}" for number, step in low.program.numbered)


def _step(step: Step, sizes: Mapping[str, int]) -> str:
    if isinstance(step, LibraryProduct):
        shapes = [" × ".join(str(f(sizes)) for f in operand.shape) for operand in (step.a, step.b, step.out)]
        return f"torch.matmul: ({shapes[0]}) @ ({shapes[1]}) -> ({shapes[2]})"
    if isinstance(step, LibraryStep):
        operands = ", ".join(f"({' × '.join(str(f(sizes)) for f in operand.shape)})" for operand in step.operands)
        results = ", ".join(f"({' × '.join(str(f(sizes)) for f in shape)})" for shape in step.shapes)
        return f"{step.function}: {operands} -> {results}"
    if isinstance(step, LoopStep):
        first, *_ = blocks = step.call.blocks(sizes)
        lines = [f"{len(blocks)} times, here for the first block:", *(_step(inner, first) for inner in step.body.steps)]
        return f"{step.body.graph.name}: " + "\n   ".join("\n".join(lines).splitlines())
    return f"{step.kernel.name}: {_layout(step, sizes)}\n   {_fields(step.kernel.body)}"


def _layout(launch: Launch, sizes: Mapping[str, int]) -> str:
    text = f"grid {launch.grid(sizes)}, block {launch.block}"
    return text + (f", {human_bytes(launch.shared_bytes)} shared" if launch.shared_bytes else "")


def _fields(body: object) -> str:
    """The plan that a kernel's body was made by, field by field."""
    plan = getattr(body, "plan", None)
    if not dataclasses.is_dataclass(plan):
        return "no plan"
    values = [(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
    shown = ", ".join(f"{name}={value.value if isinstance(value, Enum) else value}" for name, value in values)
    return f"{type(plan).__name__}: {shown}"


_RULES: Mapping[str, Callable[[Lowered], str]] = {
    "trace": lambda low: str(low.traced),
    "graph": lambda low: str(low.graph),
    "groups": _groups,
    "plan": _plan,
}
