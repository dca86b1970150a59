"""What a program does, for people: its steps, their launches, the bytes they move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fusegen.dtypes import DType
from fusegen.emit.cuda import FAST_MATH, approximated
from fusegen.families import expected_times
from fusegen.families.gemm.heuristics import ProductChoice
from fusegen.families.roofline import Roofline, roofline
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph
from fusegen.ir.infer import shape_text
from fusegen.ir.symbolic import Shape
from fusegen.program.call import arrange, bytes_of, peak_of
from fusegen.program.formula import Formula
from fusegen.schedule.program import Launch, LibraryProduct, LibraryStep, LoopStep, Program, Step
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
    expected = [*_expected(step, choices), *_ranked(step, sizes, program.target)] or _at_peak(work)
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
    traffic = _traffic(step.traffic.read, step.traffic.written, sizes)
    if isinstance(step, LoopStep):
        return [traffic, work, *_blocks(step, sizes)]
    if not isinstance(step, Launch):
        return [traffic, work]
    layout = f"grid {step.grid(sizes)}, block {step.block}"
    layout += f", {human_bytes(step.shared_bytes)} shared" if step.shared_bytes else ""
    layout += ", overlaps with the end of the one before" if step.overlaps else ""
    return [layout, traffic, work, *([step.group.reason] if step.group.reason else [])]


def _blocks(step: LoopStep, sizes: Mapping[str, int]) -> list[str]:
    """The number of blocks, and the steps of each."""
    first, *others = step.call.blocks(sizes)
    rows, (_, workspace) = first[step.blocks.rows.name], arrange(step.body.call, first)
    count = f"{len(others) + 1} blocks of up to {rows} rows" if others else f"1 block of {rows} rows"
    lines = [f"{count}, each of {step.body.call.described}, {human_bytes(workspace)} of workspace"]
    for number, inner in step.body.numbered:
        lines.append(f"  {number} {explain_title(inner)}")
        lines += [f"     {line}" for line in _blocks(inner, first)] if isinstance(inner, LoopStep) else []
    return lines


def _expected(step: Step, choices: Mapping[int, ProductChoice]) -> list[str]:
    """What a launch of products, or what takes its place, was expected to take."""
    choice = next((choices[p] for p in step.group.anchors if p in choices), None)
    if choice is None or choice.ours is None or isinstance(step, Launch) == choice.takes_library:
        return []
    return [
        f"expected: {choice.ours:.1f} µs by a kernel of ours, {choice.library:.1f} µs by the library with its epilogue behind it"
    ]


def _ranked(step: Step, sizes: Mapping[str, int], target: Target) -> list[str]:
    """What a launch was expected to take with its plan, and with the best of the others."""
    if not isinstance(step, Launch) or step.plan is None:
        return []
    times = expected_times(step, sizes, target)
    if step.plan not in times:
        return []
    others = sorted((time, plan.words) for plan, time in times.items() if plan != step.plan)
    beside = "".join(f"; {time:.1f} µs with {words}" for time, words in others[:1])
    more = f" (best of {len(others)} others)" if len(others) > 1 else ""
    return [f"expected: {times[step.plan]:.1f} µs with {step.plan.words}{beside}{more}"]


def _at_peak(work: Roofline) -> list[str]:
    """What a step takes at least, of which nothing else is known."""
    return [] if work.seconds is None else [f"expected: {work.seconds * 1e6:.1f} µs or more, at peak rates"]


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
    """The launches of a step, with their graphs."""
    if isinstance(step, Launch):
        yield graph, step
    elif isinstance(step, LoopStep):
        for inner in step.body.steps:
            yield from _launches(step.body.graph, inner)


def _traffic(read: Formula, written: Formula, sizes: Mapping[str, int]) -> str:
    return f"reads {human_bytes(read(sizes))}, writes {human_bytes(written(sizes))}"
