"""Descriptions of lowered kernels: `explain` and the summary of the REPL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fusegen.dtypes import DType
from fusegen.eager_cost import EagerCost
from fusegen.emit.cuda import FAST_MATH, approximated
from fusegen.families import expected_times
from fusegen.families.base import MARGIN
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.roofline import roofline
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, type_text
from fusegen.ir.index_map import first_version
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Shape
from fusegen.program.call import bytes_of, peak_of, plan_workspace
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, LibraryMatmul, LibraryStep, LoopStep, Program, Step
from fusegen.source import Source
from fusegen.target import Target
from fusegen.units import counted, human_bytes


def explain(program: Program, sizes: Mapping[str, int], choices: Mapping[int, MatmulChoice]) -> str:
    """Describes each step of a program in one paragraph.

    A paragraph states the kind and layout, bytes read and written, FLOPs, the bound and the expected time. It adds the time of the
    best other candidate, the reason if that one is faster, and a warning if most SMs idle. FLOPs are counted as in
    `schedule.flops`; peaks are those of `schedule.peaks`.

    Args:
        sizes: sizes of the example arguments.
        choices: the selected implementation of each matmul.
    """
    lines = [explain_head(program, sizes)]
    for number, step in program.numbered:
        first, *details = explain_step(program, step, sizes, choices)
        lines += [f"{number} {first}", *(f"   {line}" for line in details)]
    if workspace := bytes_of(program.call, sizes):
        peak = peak_of(program.call, sizes)
        lines.append(f"workspace: {human_bytes(workspace)}{f', peak {peak} bytes' if peak else ''}")
    return "\n".join(lines)


def explain_head(program: Program, sizes: Mapping[str, int]) -> str:
    """Describes the kernel, its target, its steps, and the sizes of the example."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(sizes.items()) if "_stride" not in name)
    return f"{program.graph.name} for {program.target.name}: {program.call.summary}{f' at {shown}' if shown else ''}"


_NOTES = {"attention_backward": ": adds in no fixed order unless torch.use_deterministic_algorithms(True)"}
"""Remarks on library functions."""


_IDLE = 2  # SMs per block from which on most of the GPU idles
_WORTH_A_LAUNCH = 1 << 18  # bytes that a block moves in about the latency of a launch


def explain_title(step: Step) -> str:
    """Returns the name and kind of a step; for a library matmul also why no kernel computes it, and whether rows are padded."""
    if isinstance(step, LibraryMatmul):
        reason = [step.reason] if step.reason else []
        remarks = ", ".join([*reason, *(f"rows padded to {row}" for row in step.padded)])
        return f"torch.matmul (library){f': {remarks}' if remarks else ''}"
    if isinstance(step, LoopStep):
        return f"{step.body.graph.name}: loop over blocks of {step.blocks.extent} rows"
    if isinstance(step, LibraryStep):
        return f"{step.function} (library){_NOTES.get(step.function, '')}"
    return f"{step.kernel.name}: {step.description}"


def explain_step(program: Program, step: Step, sizes: Mapping[str, int], choices: Mapping[int, MatmulChoice]) -> list[str]:
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
        name: name of the argument, the result, or the operation that computes the value.
        shape: shape with symbolic sizes.
        owner: ``an argument`` or ``a result`` if the value is one, and thus alive anyway; empty for a value kept only for the
            backward pass.
    """

    name: str
    dtype: DType
    shape: Shape
    owner: str = ""

    def line(self, sizes: Mapping[str, int]) -> str:
        shape = shape_text(tuple(formula(dim)(sizes) for dim in self.shape))
        return f"{self.name}: {self.dtype.short} {shape}, {human_bytes(self.size(sizes))}{f', {self.owner}' if self.owner else ''}"

    def size(self, sizes: Mapping[str, int]) -> int:
        return prod(formula(dim)(sizes) for dim in self.shape) * self.dtype.itemsize


def explain_saved(values: Sequence[SavedValue], sizes: Mapping[str, int]) -> str:
    """Lists the values that a forward pass saves for its backward pass, with their bytes."""
    total = sum(value.size(sizes) for value in values)
    extra = sum(value.size(sizes) for value in values if not value.owner)
    head = f"saved for the backward pass: {human_bytes(total)}, {human_bytes(extra)} besides arguments and results"
    return "\n".join([head, *(f"   {value.line(sizes)}" for value in values)])


def _facts(step: Step, sizes: Mapping[str, int], work: str) -> list[str]:
    traffic = f"reads {human_bytes(step.traffic.read(sizes))}, writes {human_bytes(step.traffic.written(sizes))}"
    if isinstance(step, LoopStep):
        return [traffic, work, *_blocks(step, sizes)]
    if not isinstance(step, Launch):
        return [traffic, work]
    layout = f"grid {step.grid(sizes)}, block {step.block}"
    layout += f", {human_bytes(step.shared_bytes)} shared" if step.shared_bytes else ""
    layout += ", starts during the end of the previous launch" if step.overlaps and not step.waits else ""
    layout += ", waits for the blocks of the part before" if step.waits and step.part else ""
    return [layout, traffic, work, *([step.group.reason] if step.group.reason else [])]


def _blocks(step: LoopStep, sizes: Mapping[str, int]) -> list[str]:
    first, *remaining = step.call.blocks(sizes)
    rows, (_, workspace) = first[step.blocks.rows.name], plan_workspace(step.body.call, first)
    count = f"{len(remaining) + 1} blocks of up to {rows} rows" if remaining else f"1 block of {rows} rows"
    lines = [f"{count}, each of {step.body.call.summary}, {human_bytes(workspace)} of workspace"]
    for number, inner in step.body.numbered:
        lines.append(f"  {number} {explain_title(inner)}")
        lines += [f"     {line}" for line in _blocks(inner, first)] if isinstance(inner, LoopStep) else []
    return lines


def _expected(step: Step, choices: Mapping[int, MatmulChoice]) -> list[str]:
    """States the expected times of a fused matmul kernel, of the library, and of two kernels."""
    choice = next((choices[p] for p in step.group.core_nodes if p in choices), None)
    if choice is None or choice.generated_time is None or isinstance(step, Launch) == choice.takes_library:
        return []
    times = [f"{choice.generated_time:.1f} µs as a generated kernel"]
    if choice.library_time is not None:
        times.append(f"{choice.library_time:.1f} µs as a library matmul and separate epilogue")
    return [f"expected: {', '.join(times)}", *_expected_apart(choice.whole or choice)]


def _expected_apart(choice: MatmulChoice) -> list[str]:
    """States the expected times of one kernel that reduces heads, and of two."""
    if choice.apart_time is None or choice.generated_time is None:
        return []
    apart, whole = choice.apart_time, choice.generated_time
    return [f"expected: {apart:.1f} µs with heads reduced by a second kernel, {whole:.1f} µs if the matmuls' kernel reduces them"]


def _ranked(step: Step, sizes: Mapping[str, int], target: Target) -> list[str]:
    if not isinstance(step, Launch) or step.plan is None:
        return []
    times = expected_times(step, sizes, target)
    if step.plan not in times:
        return []
    alternatives = sorted((time, plan.description) for plan, time in times.items() if plan != step.plan)
    runner_up = "".join(f"; {time:.1f} µs with {words}" for time, words in alternatives[:1])
    more = f" ({rated_text(len(times), 2)})" if len(alternatives) > 1 else ""
    return [f"expected: {times[step.plan]:.1f} µs with {step.plan.description}{_margin(step, times)}{runner_up}{more}"]


def _margin(step: Launch, times: Mapping[Plan, float]) -> str:
    """States the reason why the default candidate is chosen although another one is faster."""
    assert step.plan is not None
    is_kept = step.plan == step.candidates[0] and MARGIN * times[step.plan] <= min(times.values()) < times[step.plan]
    return f", the default within {100 - round(100 * MARGIN)} % of the fastest" if is_kept else ""


def rated_text(rated: int, shown: int) -> str:
    """Returns the numbers of candidates with an expected time, and of those that a text shows."""
    return f"{rated} candidates rated, {shown} shown"


def _idling(step: Step, sizes: Mapping[str, int], target: Target) -> list[str]:
    """Warns if a launch has much work but few blocks, so that most SMs idle."""
    blocks = step.grid(sizes) if isinstance(step, Launch) and not step.part else target.sms
    if _IDLE * blocks >= target.sms or step.traffic.moved(sizes) < _WORTH_A_LAUNCH * blocks:
        return []
    return [f"warning: {counted(blocks, 'block')} for {target.sms} SMs: most SMs idle"]


def _approximate(program: Program, step: Step) -> list[str]:
    ops = dict.fromkeys(op for graph, launch in _launches(program.graph, step) for op in approximated(graph, launch.group))
    return [f"fast math: {op.row.name} within {FAST_MATH[op].error}, accurate {FAST_MATH[op].accurate}" for op in ops]


def _launches(graph: Graph, step: Step) -> Iterator[tuple[Graph, Launch]]:
    if isinstance(step, Launch):
        yield graph, step
    elif isinstance(step, LoopStep):
        for inner in step.body.steps:
            yield from _launches(step.body.graph, inner)


# The stages of a kernel, and their summary.


@dataclass(frozen=True)
class Stages:
    """The stages of a kernel for given sizes.

    Attributes:
        traced: the graph before simplification.
        program: the steps; its graph is the simplified one.
        languages: languages of the text; the first is that of the sources.
        saved: a line about the values that a forward pass saves; empty for other kernels.
        eager: counts the launches and bytes of torch eager; returns None if they cannot be counted.
    """

    traced: Graph
    program: Program
    sources: tuple[Source, ...]
    sizes: Mapping[str, int]
    choices: Mapping[int, MatmulChoice]
    languages: tuple[str, ...]
    saved: str
    eager: Callable[[], EagerCost | None]

    @property
    def inputs(self) -> list[str]:
        graph = self.program.graph
        tensors = [f"{spec.name}: {type_text(spec.dtype, spec.shape)}" for spec in graph.inputs]
        return tensors + [f"{name}: {dtype.short}" for name, dtype in graph.scalars]

    @property
    def results(self) -> list[str]:
        """The type of each result, and the input that it is written to, if any."""
        return [_result(self.program.graph, position) for position in self.program.graph.outputs]

    @property
    def hints(self) -> list[str]:
        """The attributes of `Lowered` that show details."""
        texts = [f'.asm["{language}"]' for language in self.languages]
        return [".explain()", ".traced", ".graph", ".groups", ".program", ".plans", *texts]


def _result(graph: Graph, position: int) -> str:
    node = graph.nodes[position]
    text = type_text(node.dtype, node.shape)
    if node.op is not Op.PUT:
        return text
    return f"{graph.nodes[first_version(graph, position)].attr('name')}, written in place: {text}"


def summary(stages: Stages) -> str:
    """Summarizes the target and sizes, inputs and results, steps, and attributes for details."""
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
