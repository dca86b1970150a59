"""``fusegen explain``: the kernels that run, the bytes and operations of each, and the saving over eager."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fusegen.cli.arguments import add_arguments as add_kernel_arguments
from fusegen.cli.arguments import lowered
from fusegen.cli.costs import Saving, saving
from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.emit.cuda.fast_math import FAST_MATH, approximated
from fusegen.lowered import Lowered
from fusegen.program.workspace import arrange
from fusegen.schedule.program import LibraryProduct, LibraryStep, LoopStep, Step
from fusegen.schedule.roofline import roofline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_kernel_arguments(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the program and the saving."""
    found, arguments, low = lowered(options)
    saved = saving(low, found.kernel.function, arguments)
    if options.json:
        steps = [_fact(low, step) for step in low.program.steps]
        sizes = {name: size for name, size in low.sizes.items() if "_stride" not in name}
        _, workspace = arrange(low.program.call, low.sizes)
        print_document(
            terminal, "explain", kernel=found.name, target=low.target.name, sizes=sizes, steps=steps, workspace_bytes=workspace,
            **saving_fields(saved),
        )  # fmt: skip
        return 0
    terminal.line(low.explain())
    terminal.line()
    for line in saved.lines():
        terminal.line(line)
    return 0


def saving_fields(saved: Saving) -> dict[str, object]:
    """What a kernel costs and what eager costs, null where it cannot be counted, for a document."""
    eager = saved.eager
    counted = {"launches": eager.launches, "operations": eager.operations, "moved_bytes": eager.moved} if eager else None
    return {"fusegen": {"launches": saved.steps, "moved_bytes": saved.moved}, "eager": counted}


@dataclass(frozen=True)
class StepFact:
    """A step as the document states it.

    Attributes:
        name: of the kernel; None for a library's product.
        kind: of the group.
        grid, block: of the launch; None for a library's product.
        shared_bytes: of a block.
        read_bytes, written_bytes: of the whole step.
        flops, flops_per_byte: operations of the whole step, and over its bytes.
        flops_uncounted: the work that they leave out.
        ridge_flops_per_byte: of the target's GPU; None where its peaks are not known.
        bound: ``bandwidth``, ``arithmetic`` or ``launch latency``; None likewise.
        reason: why it is made like this, if there is something to say.
        fast_math: the functions that ``fast_math=True`` makes approximate, each with its documented error and the accurate one.
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
    if isinstance(step, LibraryProduct):
        return StepFact(None, "library product", None, None, 0, *figures, step.reason)
    if isinstance(step, LoopStep):
        return StepFact(step.body.graph.name, step.group.kind.value, None, None, 0, *figures, step.body.call.described)
    if isinstance(step, LibraryStep):
        return StepFact(None, step.group.kind.value, None, None, 0, *figures, step.function)
    kind, reason = step.group.kind.value, step.group.reason
    found = [(op.row.name, FAST_MATH[op]) for op in approximated(low.graph, step.group)]
    fast_math = tuple({"function": name, "error": each.error, "accurate": each.accurate} for name, each in found)
    return StepFact(step.kernel.name, kind, step.grid(low.sizes), step.block, step.shared_bytes, *figures, reason, fast_math)
