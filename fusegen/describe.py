"""Kernels described for people: `explain`, the summary that the REPL prints, and the page that a notebook shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import jinja2

from fusegen.dtypes import DType
from fusegen.emit.cuda import FAST_MATH, approximated
from fusegen.emit.environment import html_environment
from fusegen.families import expected_times
from fusegen.families.gemm.heuristics import ProductChoice
from fusegen.families.roofline import roofline
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, type_text
from fusegen.ir.index_map import owner
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Shape
from fusegen.program.call import bytes_of, peak_of, plan_workspace
from fusegen.schedule.program import Launch, LibraryProduct, LibraryStep, LoopStep, Program, Step
from fusegen.source import Source
from fusegen.target import Target
from fusegen.units import human_bytes


def explain(program: Program, sizes: Mapping[str, int], choices: Mapping[int, ProductChoice]) -> str:
    """One paragraph a step: its kind, its layout, the bytes that it reads and writes, its floating-point operations and what binds
    it, the expected time, where there was a choice also those of others, and a warning where most of the GPU idles meanwhile.

    Operations are counted by the rule of `schedule.flops`, and compared with the peaks of `schedule.peaks`.

    Args:
        sizes: of the example.
        choices: for products, what was chosen.
    """
    lines = [explain_head(program, sizes)]
    for number, step in program.numbered:
        first, *others = explain_step(program, step, sizes, choices)
        lines += [f"{number} {first}", *(f"   {line}" for line in others)]
    if workspace := bytes_of(program.call, sizes):
        peak = peak_of(program.call, sizes)
        lines.append(f"workspace: {human_bytes(workspace)}{f', {peak} bytes at once' if peak else ''}")
    return "\n".join(lines)


def explain_head(program: Program, sizes: Mapping[str, int]) -> str:
    """The kernel, its target, the number of its steps, and the sizes of the example."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(sizes.items()) if "_stride" not in name)
    return f"{program.graph.name} for {program.target.name}: {program.call.described}{f' at {shown}' if shown else ''}"


_NOTES = {"attention_backward": ": adds in any order, but under torch.use_deterministic_algorithms(True)"}
"""Words on functions of torch."""


_IDLE = 2  # times as many multiprocessors as blocks leave most idle
_WORTH_A_LAUNCH = 1 << 18  # bytes that a block moves in about the time of a launch


def explain_title(step: Step) -> str:
    """The name of a step and its kind; of a matmul by the library, why no kernel computes it, and padded rows."""
    if isinstance(step, LibraryProduct):
        reason = [step.reason] if step.reason else []
        said = ", ".join([*reason, *(f"rows padded to {row}" for row in step.padded)])
        return f"torch.matmul (library){f': {said}' if said else ''}"
    if isinstance(step, LoopStep):
        return f"{step.body.graph.name}: loop over blocks of {step.blocks.extent} rows"
    if isinstance(step, LibraryStep):
        return f"{step.function} (library){_NOTES.get(step.function, '')}"
    return f"{step.kernel.name}: {step.words}"


def explain_step(program: Program, step: Step, sizes: Mapping[str, int], choices: Mapping[int, ProductChoice]) -> list[str]:
    """The lines of one step, its title first."""
    work = roofline(step, program.graph, sizes, program.target)
    expected = [*_expected(step, choices), *_ranked(step, sizes, program.target)]
    if not expected and work.seconds is not None:
        expected = [f"expected: {work.seconds * 1e6:.1f} µs or more, at peak rates"]
    lines = [*_facts(step, sizes, work.describe()), *expected, *_idling(step, sizes, program.target)]
    return [explain_title(step), *lines, *_approximate(program, step)]


@dataclass(frozen=True)
class SavedValue:
    """A value that a forward pass saves for its backward pass.

    Attributes:
        name: of an argument or a result, or the operation that makes the value.
        dtype, shape: of it, in symbols.
        held: what holds it anyway: ``an argument``, ``a result``; nothing where the pass alone does.
    """

    name: str
    dtype: DType
    shape: Shape
    held: str = ""

    def line(self, sizes: Mapping[str, int]) -> str:
        """The value in words."""
        shape = shape_text(tuple(formula(dim)(sizes) for dim in self.shape))
        return f"{self.name}: {self.dtype.short} {shape}, {human_bytes(self.size(sizes))}{f', {self.held}' if self.held else ''}"

    def size(self, sizes: Mapping[str, int]) -> int:
        """Bytes."""
        return prod(formula(dim)(sizes) for dim in self.shape) * self.dtype.itemsize


def explain_saved(values: Sequence[SavedValue], sizes: Mapping[str, int]) -> str:
    """The bytes that a forward pass saves for its backward pass, and a line for each value."""
    everything = sum(value.size(sizes) for value in values)
    further = sum(value.size(sizes) for value in values if not value.held)
    head = f"saved for the backward pass: {human_bytes(everything)}, {human_bytes(further)} beside arguments and results"
    return "\n".join([head, *(f"   {value.line(sizes)}" for value in values)])


def _facts(step: Step, sizes: Mapping[str, int], work: str) -> list[str]:
    """The layout of a launch, its traffic, its work, and why it is made like this."""
    traffic = f"reads {human_bytes(step.traffic.read(sizes))}, writes {human_bytes(step.traffic.written(sizes))}"
    if isinstance(step, LoopStep):
        return [traffic, work, *_blocks(step, sizes)]
    if not isinstance(step, Launch):
        return [traffic, work]
    layout = f"grid {step.grid(sizes)}, block {step.block}"
    layout += f", {human_bytes(step.shared_bytes)} shared" if step.shared_bytes else ""
    layout += ", overlaps with the end of the one before" if step.overlaps else ""
    return [layout, traffic, work, *([step.group.reason] if step.group.reason else [])]


def _blocks(step: LoopStep, sizes: Mapping[str, int]) -> list[str]:
    first, *others = step.call.blocks(sizes)
    rows, (_, workspace) = first[step.blocks.rows.name], plan_workspace(step.body.call, first)
    count = f"{len(others) + 1} blocks of up to {rows} rows" if others else f"1 block of {rows} rows"
    lines = [f"{count}, each of {step.body.call.described}, {human_bytes(workspace)} of workspace"]
    for number, inner in step.body.numbered:
        lines.append(f"  {number} {explain_title(inner)}")
        lines += [f"     {line}" for line in _blocks(inner, first)] if isinstance(inner, LoopStep) else []
    return lines


def _expected(step: Step, choices: Mapping[int, ProductChoice]) -> list[str]:
    """The expected times of a launch of products, or of what takes its place."""
    choice = next((choices[p] for p in step.group.anchors if p in choices), None)
    if choice is None or choice.ours is None or isinstance(step, Launch) == choice.takes_library:
        return []
    return [
        f"expected: {choice.ours:.1f} µs by a kernel of ours, {choice.library:.1f} µs by the library with its epilogue behind it"
    ]


def _ranked(step: Step, sizes: Mapping[str, int], target: Target) -> list[str]:
    """The expected times of a launch with its plan, and with the best of the others."""
    if not isinstance(step, Launch) or step.plan is None:
        return []
    times = expected_times(step, sizes, target)
    if step.plan not in times:
        return []
    others = sorted((time, plan.words) for plan, time in times.items() if plan != step.plan)
    beside = "".join(f"; {time:.1f} µs with {words}" for time, words in others[:1])
    more = f" (best of {len(others)} others)" if len(others) > 1 else ""
    return [f"expected: {times[step.plan]:.1f} µs with {step.plan.words}{beside}{more}"]


def _idling(step: Step, sizes: Mapping[str, int], target: Target) -> list[str]:
    """A warning of a launch whose blocks are few, and have much to do each."""
    blocks = step.grid(sizes) if isinstance(step, Launch) and not step.part else target.processors
    if _IDLE * blocks >= target.processors or step.traffic.moved(sizes) < _WORTH_A_LAUNCH * blocks:
        return []
    count = "1 block" if blocks == 1 else f"{blocks} blocks"
    return [f"warning: {count} for {target.processors} SMs: most of the device idles"]


def _approximate(program: Program, step: Step) -> list[str]:
    """The functions that are approximate because the kernel asks for it, with their documented errors and the accurate ones."""
    found = dict.fromkeys(op for graph, launch in _launches(program.graph, step) for op in approximated(graph, launch.group))
    return [f"fast math: {op.row.name} within {FAST_MATH[op].error}, accurate {FAST_MATH[op].accurate}" for op in found]


def _launches(graph: Graph, step: Step) -> Iterator[tuple[Graph, Launch]]:
    if isinstance(step, Launch):
        yield graph, step
    elif isinstance(step, LoopStep):
        for inner in step.body.steps:
            yield from _launches(step.body.graph, inner)


# The stages of a kernel, in a few lines and as a page of HTML that needs nothing else.


@dataclass(frozen=True)
class Stages:
    """The stages of a kernel for some sizes.

    Attributes:
        traced: the graph as the function was traced.
        program: the steps; its graph is the simplified one.
        sources: the text of each launch.
        sizes: of the example arguments.
        choices: of matmuls, by their positions in the graph.
        languages: of the text, that of the sources first.
        saved: a line about the values that a forward pass saves; empty for other kernels.
    """

    traced: Graph
    program: Program
    sources: tuple[Source, ...]
    sizes: Mapping[str, int]
    choices: Mapping[int, ProductChoice]
    languages: tuple[str, ...]
    saved: str

    @property
    def inputs(self) -> list[str]:
        """Each input and each run-time number, with its type."""
        graph = self.program.graph
        tensors = [f"{spec.name}: {type_text(spec.dtype, spec.shape)}" for spec in graph.inputs]
        return tensors + [f"{name}: {dtype.short}" for name, dtype in graph.scalars]

    @property
    def results(self) -> list[str]:
        """The type of each result, with the input whose memory it is, if it is one."""
        return [_result(self.program.graph, position) for position in self.program.graph.outputs]

    @property
    def hints(self) -> list[str]:
        """The attributes of `Lowered` that show more."""
        texts = [f'.asm["{language}"]' for language in self.languages]
        return [".explain()", ".traced", ".graph", ".groups", ".program", ".plans", *texts]


def _result(graph: Graph, position: int) -> str:
    node = graph.nodes[position]
    text = type_text(node.dtype, node.shape)
    if node.op is not Op.PUT:
        return text
    return f"{graph.nodes[owner(graph, position)].attr('name')}, written in place: {text}"


def summary(stages: Stages) -> str:
    """Name, target and sizes; inputs and results; a line for each step; the attributes that show more."""
    lines = [
        explain_head(stages.program, stages.sizes),
        f"  inputs: {', '.join(stages.inputs) or 'none'}",
        f"  results: {', '.join(stages.results) or 'none'}",
        *(f"  {number} {_step(stages, step)}" for number, step in stages.program.numbered),
        *([f"  {stages.saved}"] if stages.saved else []),
        f"  more: {', '.join(stages.hints)}",
    ]
    return "\n".join(lines)


def _step(stages: Stages, step: Step) -> str:
    read, written = step.traffic.read(stages.sizes), step.traffic.written(stages.sizes)
    return f"{explain_title(step)}; reads {human_bytes(read)}, writes {human_bytes(written)}"


@dataclass(frozen=True)
class Shown:
    """A step on the page.

    Attributes:
        title: its name and its kind.
        facts: the other lines of `explain`.
        source: the text of a launch; None for a matmul of the library.
        passages: that text in passages.
    """

    title: str
    facts: tuple[str, ...]
    source: Source | None
    passages: tuple[Passage, ...]


def page(stages: Stages) -> str:
    """The page: inputs and results, both graphs, and each step with its text beside the user's lines."""
    return _template().render(
        head=explain_head(stages.program, stages.sizes), stages=stages, graph=stages.program.graph, steps=list(_steps(stages))
    )


def _steps(stages: Stages) -> Iterator[Shown]:
    sources = iter(stages.sources)
    for step in stages.program.steps:
        title, *facts = explain_step(stages.program, step, stages.sizes, stages.choices)
        source = next(sources) if isinstance(step, Launch) else None
        yield Shown(title, tuple(facts), source, tuple(passages(source.kernel_text)) if source else ())


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return html_environment().get_template("describe/lowered.html.jinja")


# Emitted text in passages, each with the user's line that it comes from.


_PLACE = re.compile(r"^(?P<code>.*?)\s*// (?P<place>line \d+: .*)$")  # as `emit.math` writes it


@dataclass
class Passage:
    """Lines of emitted text.

    Attributes:
        place: the number and the text of the user's line; empty where the text comes from no line.
    """

    place: str
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


def passages(text: str) -> list[Passage]:
    """The text in passages. A user's line holds from its comment to the next one, or to the end of the function."""
    found = [Passage("")]
    for line in text.splitlines():
        place = _PLACE.match(line)
        ends = line.startswith("}") and found[-1].place
        if place or ends:
            found.append(Passage(place["place"] if place else ""))
        found[-1].lines.append(place["code"] if place else line)
    return [passage for passage in found if passage.lines]
