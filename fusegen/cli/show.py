"""``fusegen list``, ``show`` and ``explain``: the prebuilt fusions, a kernel's compilation stages, the cost of its launches."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fusegen.cli.arguments import add_kernel_arguments, lowered
from fusegen.cli.terminal import Terminal, print_document
from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.emit.cuda import FAST_MATH, approximated
from fusegen.errors import ArgumentError, ToolNotFoundError
from fusegen.families.roofline import roofline
from fusegen.files import PAGE, check_writable, write_for_user
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.lowered import Lowered
from fusegen.program.call import plan_workspace
from fusegen.runtime.callables import by_name
from fusegen.schedule.program import Launch, LibraryMatmul, LibraryStep, LoopStep, Step
from fusegen.specs import FAMILIES, SPECS, Spec
from fusegen.units import human_bytes
from fusegen.verify.record import COMMAND, TARGETS, SpecRecord, own_folder, path_of, read

_READ_FIRST = ("trace", "graph", "groups", "plan", "cuda", "cpp")


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)
    stage_help = "print only this stage, or all stages (default: the stages up to the source)"
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--stage", choices=(*STAGES, "all"), help=stage_help)
    shown.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page: graph, traffic, plan, and your lines beside the source"
    )
    parser.add_argument("--sass", action="store_true", help="with --html: add the machine code, which lights up with your lines")


def run_show(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the stages, or writes the page. A single stage is printed alone and complete, so that it can be piped into a file."""
    if options.html is not None:
        check_writable(options.html, "--html", PAGE)
    elif options.sass:
        raise ArgumentError(
            "--sass adds machine code to the page of --html", hint="--html FILE --sass, or --stage sass to print it"
        )
    named, _, low = lowered(options)
    if options.html is not None:
        write_for_user(options.html, low.html(sass=options.sass), "choose another file with --html")
        if options.json:
            print_document(terminal, "show", kernel=named.name, target=low.target.name, html=str(options.html))
        else:
            terminal.line(f"{options.html}: {named.name} for {low.target.name}")
        return 0
    is_one = options.stage not in (None, "all")
    requested = [options.stage] if is_one else [s for s in available(low) if options.stage == "all" or s in _READ_FIRST]
    if options.json:
        stages, missing = _texts(low, requested, is_one)
        print_document(terminal, "show", kernel=named.name, target=low.target.name, stages=stages, missing=missing)
    elif is_one:
        _print(terminal, stage_text(low, options.stage), options.stage)
    else:
        _print_all(terminal, low, requested)
    return 0


def _texts(low: Lowered, requested: Sequence[str], is_one: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The stages' texts, and the errors of stages whose tool is missing; the error of a single stage is raised."""
    texts, missing = {}, {}
    for stage in requested:
        try:
            texts[stage] = stage_text(low, stage)
        except ToolNotFoundError as error:
            if is_one:
                raise
            missing[stage] = error.one_line
    return texts, missing


def _print_all(terminal: Terminal, low: Lowered, stages: Sequence[str]) -> None:
    for stage in stages:
        terminal.title(f"{stage} ({low.target.name})" if stage in LANGUAGES else stage)
        try:
            text = own_text(low) if stage in ("cuda", "cpp") and low.sources else stage_text(low, stage)
            _print(terminal, text, stage)
        except ToolNotFoundError as error:
            terminal.line(error.one_line, "yellow")


def _print(terminal: Terminal, text: str, stage: str) -> None:
    if stage in ("cuda", "cpp"):
        terminal.code(text, LANGUAGES[stage])
    else:
        terminal.line(text)


# The stages of a lowered kernel as text.

LANGUAGES = {"cuda": "cuda", "cpp": "cpp", "ptx": "ptx", "sass": "sass"}
"""Stages that are code, and their language for syntax highlighting."""

STAGES = ("trace", "graph", "groups", "plan", *LANGUAGES)
"""All stages, in order."""


def available(low: Lowered) -> tuple[str, ...]:
    return tuple(stage for stage in STAGES if stage not in LANGUAGES or stage in tuple(low.asm))


def stage_text(low: Lowered, stage: str) -> str:
    """The text of a stage.

    Raises:
        ArgumentError: the target has no such stage.
        ToolNotFoundError: the stage needs a compiler or disassembler that is not installed.
    """
    if stage not in available(low):
        raise ArgumentError(f"{low.target.name} has no stage {stage!r}", hint=f"--stage {' | '.join(available(low))}")
    if stage in LANGUAGES:
        return low.asm[stage] if low.sources else f"// {low.graph.name}: library calls only"
    return _RULES[stage](low)


def own_text(low: Lowered) -> str:
    """The source of the kernels without the primitives, and a line that names the command for the complete source."""
    language = low.sources[0].language
    own = "\n".join(f"{source.banner}\n{source.kernel_text}" for source in low.sources)
    names = dict.fromkeys(primitive.name for source in low.sources for primitive in source.primitives)
    return f"{own}\n// {len(names)} primitives are left out: --stage {language} prints the complete source."


def _groups(low: Lowered) -> str:
    return "\n".join(f"{number}. {_group(low.graph, group)}" for number, group in enumerate(low.groups, 1))


def _group(graph: Graph, group: Group) -> str:
    shape = ", ".join(f"{extent}{'*' if d in group.domain.columns else ''}" for d, extent in enumerate(group.domain.shape))
    lines = [f"{group.kind.name} over [{shape}]"]
    lines += [f"   reads {_names(graph, group.inputs)}, writes {_names(graph, group.outputs)}"]
    lines += [f"   computes intermediates {_names(graph, group.core_nodes)}"] if group.core_nodes else []
    return "\n".join(lines + ([f"   {group.reason}"] if group.reason else []))


def _names(graph: Graph, positions: tuple[int, ...]) -> str:
    return ", ".join(_name(graph, position) for position in positions) or "nothing"


def _name(graph: Graph, position: int) -> str:
    node = graph.nodes[position]
    if node.op in (Op.INPUT, Op.SCALAR):
        return str(node.attr("name"))
    return f"%{position} {node.op.row.name}"


def _plans(low: Lowered) -> str:
    return "\n".join(f"{number} {_step(step, low.sizes)}" for number, step in low.program.numbered)


def _step(step: Step, sizes: Mapping[str, int]) -> str:
    if isinstance(step, LibraryMatmul):
        shapes = [" × ".join(str(f(sizes)) for f in operand.shape) for operand in (step.a, step.b, step.out)]
        return f"torch.matmul: ({shapes[0]}) @ ({shapes[1]}) -> ({shapes[2]})"
    if isinstance(step, LibraryStep):
        operands = ", ".join(f"({' × '.join(str(f(sizes)) for f in operand.shape)})" for operand in step.operands)
        results = ", ".join(f"({' × '.join(str(f(sizes)) for f in shape)})" for shape in step.shapes)
        return f"{step.function}: {operands} -> {results}"
    if isinstance(step, LoopStep):
        first, *_ = blocks = step.call.blocks(sizes)
        lines = [f"{len(blocks)} iterations; steps of the first block:", *(_step(inner, first) for inner in step.body.steps)]
        return f"{step.body.graph.name}: " + "\n   ".join("\n".join(lines).splitlines())
    return f"{step.kernel.name}: {_layout(step, sizes)}\n   {_fields(step.kernel.body)}"


def _layout(launch: Launch, sizes: Mapping[str, int]) -> str:
    text = f"grid {launch.grid(sizes)}, block {launch.block}"
    return text + (f", {human_bytes(launch.shared_bytes)} shared" if launch.shared_bytes else "")


def _fields(body: object) -> str:
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
    "plan": _plans,
}


# ``fusegen explain``: the kernels that run, their bytes and operations, and the saving over eager.


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)


def run_explain(options: argparse.Namespace, terminal: Terminal) -> int:
    named, arguments, low = lowered(options)
    saved = saving(low, named.kernel.function, arguments)
    if options.json:
        steps = [_fact(low, step) for step in low.program.steps]
        sizes = {name: size for name, size in low.sizes.items() if "_stride" not in name}
        _, workspace = plan_workspace(low.program.call, low.sizes)
        print_document(
            terminal, "explain", kernel=named.name, target=low.target.name, sizes=sizes, steps=steps, workspace_bytes=workspace,
            **saving_fields(saved),
        )  # fmt: skip
        return 0
    for line in low.explain().splitlines():
        terminal.wrapped(line, "" if line.startswith(" ") else "bold cyan")
    terminal.line()
    *costs, verdict = saved.lines()
    for line in costs:
        terminal.wrapped(line)
    terminal.wrapped(verdict, "green" if verdict.startswith("saved") else "yellow")
    return 0


def saving_fields(saved: Saving) -> dict[str, object]:
    """The costs of the kernel and of eager for the document; null if they cannot be counted."""
    eager = saved.eager
    counted = {"launches": eager.launches, "operations": eager.operations, "moved_bytes": eager.moved} if eager else None
    return {"fusegen": {"launches": saved.steps, "moved_bytes": saved.moved}, "eager": counted}


@dataclass(frozen=True)
class StepFact:
    """A step in the document.

    Attributes:
        name: the kernel's name; None for a library call.
        kind: the kind of the group.
        grid, block: sizes of the launch; None for a library call.
        shared_bytes: per block.
        flops_per_byte: ``flops`` over the bytes read and written.
        flops_uncounted: kinds of operations that are not in ``flops``.
        ridge_flops_per_byte: ridge point of the target's GPU; None if its peaks are unknown.
        bound: ``bandwidth``, ``arithmetic`` or ``launch latency``; None if the peaks are unknown.
        reason: why this implementation was chosen; may be empty.
        fast_math: the functions that ``fast_math=True`` approximates, with the documented errors of both versions.
    """

    name: str | None
    kind: str
    grid: int | None
    block: int | None
    shared_bytes: int
    read_bytes: int
    written_bytes: int
    flops: int
    flops_per_byte: float
    flops_uncounted: tuple[str, ...]
    ridge_flops_per_byte: float | None
    bound: str | None
    reason: str
    fast_math: tuple[dict[str, str], ...] = ()


def _fact(low: Lowered, step: Step) -> StepFact:
    work = roofline(step, low.graph, low.sizes, low.target)
    read, written = step.traffic.read(low.sizes), step.traffic.written(low.sizes)
    bound = work.bound.value if work.bound else None
    figures = (read, written, work.flops.count, work.intensity, work.flops.uncounted, work.ridge, bound)
    if isinstance(step, LibraryMatmul):
        return StepFact(None, "library matmul", None, None, 0, *figures, step.reason)
    if isinstance(step, LoopStep):
        return StepFact(step.body.graph.name, step.group.kind.name, None, None, 0, *figures, step.body.call.summary)
    if isinstance(step, LibraryStep):
        return StepFact(None, step.group.kind.name, None, None, 0, *figures, step.function)
    kind, reason = step.group.kind.name, step.group.reason
    functions = [(op.row.name, FAST_MATH[op]) for op in approximated(low.graph, step.group)]
    fast_math = tuple({"function": name, "error": function.error, "accurate": function.accurate} for name, function in functions)
    return StepFact(step.kernel.name, kind, step.grid(low.sizes), step.block, step.shared_bytes, *figures, reason, fast_math)


# The saving of fusion: launches and bytes of torch eager and of a program.


_NOTEWORTHY = 0.02  # share of the bytes


@dataclass(frozen=True)
class Saving:
    steps: int
    moved: int
    eager: EagerCost | None

    def lines(self) -> list[str]:
        ours = f"fusegen: {_launches(self.steps)}, {human_bytes(self.moved)} moved"
        if self.eager is None:
            return [ours, "torch eager: unknown, because the declaration does not run on meta tensors"]
        names = ", ".join(self.eager.operations)
        eager = f"torch eager: {_launches(self.eager.launches)} ({names}), {human_bytes(self.eager.moved)} moved"
        return [eager, ours, self._verdict(self.eager)]

    def _verdict(self, eager: EagerCost) -> str:
        launches, moved = eager.launches - self.steps, eager.moved - self.moved
        if launches < 0 or moved < 0 or (launches == 0 and moved < _NOTEWORTHY * eager.moved):
            return "no saving over eager"
        return f"saved: {_launches(launches)}, {human_bytes(moved)}; {eager.moved / max(self.moved, 1):.1f}× less traffic"


def saving(low: Lowered, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Saving:
    """The saving of a lowered kernel over its declaration run by torch."""
    moved = sum(step.traffic.moved(low.sizes) for step in low.program.steps)
    return Saving(low.step_count, moved, eager_cost(by_name(function), arguments))


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"


# ``fusegen list``: the prebuilt fusions, their variants, and the GPUs that verified them.

_LIST_COLUMNS = ("name", "variants", "gradients", "verified on", "formula")


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, help="list only the fusions of this family")


def run_list(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints one row per spec. The records may be stale: `verify --check` compares them with the code emitted today."""
    specs = [spec for spec in SPECS.values() if options.family in (None, spec.family)]
    records = {spec.name: {target: read(path_of(own_folder(), target, spec.name)) for target in TARGETS} for spec in specs}
    if options.json:
        print_document(terminal, "list", specs=[_plain_spec(spec, records[spec.name]) for spec in specs])
        return 0
    for family in dict.fromkeys(spec.family for spec in specs):
        terminal.title(family)
        terminal.table(_LIST_COLUMNS, [_spec_row(spec, records[spec.name]) for spec in specs if spec.family == family])
    unverified = [spec.name for spec in specs if not _verified_on(spec, records[spec.name])]
    if unverified:
        terminal.line(f"{len(unverified)} lack a GPU record for some dtype; on a machine with a GPU, run {COMMAND} NAME", "yellow")
    return 0


def _verified_on(spec: Spec, records: dict[str, SpecRecord]) -> list[str]:
    """The GPUs that verified a spec in all its dtypes for all shipped targets; empty if one is missing."""
    entries = [record.get(dtype.short) for record in records.values() for dtype in spec.dtypes]
    gpus = [entry.environment.gpu for entry in entries if entry is not None]
    return list(dict.fromkeys(gpus)) if len(gpus) == len(entries) else []


def _gradients(spec: Spec) -> str:
    return ", ".join(spec.gradients) if isinstance(spec.gradients, tuple) else "yes" if spec.gradients else "–"


def _spec_row(spec: Spec, records: dict[str, SpecRecord]) -> Sequence[str]:
    verified = ", ".join(gpu.removeprefix("NVIDIA ").partition(" ")[0] for gpu in _verified_on(spec, records)) or "–"
    return spec.name, " ".join(spec.variants) or "–", _gradients(spec), verified, spec.formula


def _plain_spec(spec: Spec, records: dict[str, SpecRecord]) -> dict[str, object]:
    return {
        "name": spec.name,
        "family": spec.family,
        "formula": spec.formula,
        "variants": list(spec.variants),
        "aliases": {alias: f"{spec.name}:{variant}".rstrip(":") for alias, variant in spec.aliases.items()},
        "dtypes": spec.dtypes,
        "sizes": spec.sizes,
        "gradients": spec.gradients,
        "verified": {
            target: {dtype: entry.environment.gpu for dtype, entry in record.items()} for target, record in records.items()
        },
    }
