"""``fusegen explain``: the kernels that run, the bytes and operations of each, and the saving over eager."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusegen.cli.arguments import add_arguments as add_kernel_arguments
from fusegen.cli.arguments import lowered
from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.emit.cuda.spelling import FAST_MATH, approximated
from fusegen.lowered import Lowered
from fusegen.program.call import arrange
from fusegen.schedule.program import LibraryProduct, LibraryStep, LoopStep, Step
from fusegen.schedule.report import roofline
from fusegen.units import human_bytes


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


# The savings of fusing, in words: launches and bytes of torch eager beside those of a program.


@dataclass(frozen=True)
class Saving:
    """Launches and bytes, of a program and of eager (None where eager cannot be counted)."""

    steps: int
    moved: int
    eager: EagerCost | None

    def lines(self) -> list[str]:
        """As text."""
        ours = f"fusegen: {_launches(self.steps)}, {human_bytes(self.moved)} moved"
        if self.eager is None:
            return [ours, "torch eager: cannot be counted, since the declaration does not run on meta tensors"]
        names = ", ".join(self.eager.operations)
        eager = f"torch eager: {_launches(self.eager.launches)} ({names}), {human_bytes(self.eager.moved)} moved"
        return [eager, ours, self._verdict(self.eager)]

    def _verdict(self, eager: EagerCost) -> str:
        launches, moved = eager.launches - self.steps, eager.moved - self.moved
        if launches < 0 or moved < 0:
            bytes_moved = f"{human_bytes(self.moved)} against {human_bytes(eager.moved)}"
            return f"nothing saved: {_launches(self.steps)} against {eager.launches}, {bytes_moved}"
        return f"saved: {_launches(launches)}, {human_bytes(moved)}; {eager.moved / max(self.moved, 1):.1f}× less traffic"


def saving(low: Lowered, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Saving:
    """What a lowered kernel saves over its own declaration, run by torch."""
    moved = sum(step.traffic.moved(low.sizes) for step in low.program.steps)
    return Saving(len(low.program.steps), moved, eager_cost(function, arguments))


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"
