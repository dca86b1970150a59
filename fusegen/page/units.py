"""The steps of a program and of its loops, each with its place on the page: number, colour, emitted text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusegen.fusion.groups import computed
from fusegen.ir.graph import Graph
from fusegen.schedule.program import Launch, LoopStep, Program, Step, started_together
from fusegen.source import Source

COLOURS = 8
"""Colours of kernels; later kernels repeat them."""


@dataclass(frozen=True)
class Unit:
    """A launch, or another step.

    Attributes:
        number: position in the program, from 1; units of a loop have that of the loop.
        parts: the parts of a launch; one step otherwise.
        source: the emitted text of a launch.
        is_inner: True in the body of a loop.
    """

    number: int
    graph: Graph
    parts: Sequence[Step]
    source: Source | None
    is_inner: bool

    @property
    def colour(self) -> int:
        return (self.number - 1) % COLOURS

    @property
    def name(self) -> str:
        """The name of the kernel, or of the function of torch."""
        first = self.parts[0]
        if isinstance(first, Launch):
            return " + ".join(part.kernel.name for part in self.parts if isinstance(part, Launch))
        return f"loop {first.body.graph.name}" if isinstance(first, LoopStep) else getattr(first, "function", "torch.matmul")

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes of the graph that it computes."""
        return frozenset().union(*(computed(self.graph, part.group) for part in self.parts))


def units_of(program: Program, sources: Sequence[Source]) -> list[Unit]:
    return list(_units(program, iter(sources), 0))


def _units(program: Program, sources: Iterator[Source], outer: int) -> Iterator[Unit]:
    for number, run in enumerate(started_together(program.steps), 1):
        parts = run if isinstance(run, tuple) else (run,)
        yield Unit(outer or number, program.graph, parts, next(sources) if isinstance(run, tuple) else None, bool(outer))
        if isinstance(run, LoopStep):
            yield from _units(run.body, sources, outer or number)
